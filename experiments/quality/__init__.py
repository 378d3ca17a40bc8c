"""Is the measured quality right? Calibrated rank correlations beside those with retraining, on many kinds of run."""
