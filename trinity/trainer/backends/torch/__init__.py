"""`TrainEngine` on plain PyTorch."""
