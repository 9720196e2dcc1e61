"""HTTP under all endpoints: connections, bodies, answers, event streams, TLS and captures."""
