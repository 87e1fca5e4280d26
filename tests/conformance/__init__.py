"""What a client may rely on, checked from outside: the specification of the HTTP interface as tests.

    pytest tests/conformance [--base-url URL] [--api-key-file FILE]

Without ``--base-url`` the suite starts servers of its own: one on a scripted model, and, as slow
tests, ``llmq serve`` with a real model on either backend. Nothing here depends on which model answers.
"""
