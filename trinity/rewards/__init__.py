"""Built-in rewards. Names: `trinity.common.rewards.REWARD_FUNCTIONS`."""
