"""SGLang's features with QSPEC. A package, so that its tests share one server."""
