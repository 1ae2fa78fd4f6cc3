"""What every server and client here shares: errors, auth, TLS, deadlines, interceptors, health."""
