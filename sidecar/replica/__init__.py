"""One replica's server: the CacheAdmin service, verdicts, metrics, the application."""
