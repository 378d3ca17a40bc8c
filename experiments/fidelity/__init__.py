"""Every method against retraining, on images."""
