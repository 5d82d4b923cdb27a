"""The tests. A package, so that `test.link.wire` names a helper here and in no other `test`."""
