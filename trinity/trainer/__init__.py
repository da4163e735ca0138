"""The update loop and the engines that compute it."""
