"""Memory of the machine: estimates, grants, the broker and its policy."""
