"""The tests, a package so that helpers are found as `test.link.wire`, before any other `test`."""
