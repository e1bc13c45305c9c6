"""Learning from rewards: rollouts by an engine, and what the policy learns from them."""
