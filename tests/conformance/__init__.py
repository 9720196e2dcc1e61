"""Other people's conformance suites, run against a daemon by `make test-conformance`; see docs/conformance.md."""
