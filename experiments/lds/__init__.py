"""The linear datamodeling score, as the leaderboard of bergson defines it."""
