"""The programs import what few machines have; test_clients starts them."""

collect_ignore = ["programs"]
