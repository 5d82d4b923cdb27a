"""The tests; a package, so that `test.link.wire` names a helper here and no other `test`."""
