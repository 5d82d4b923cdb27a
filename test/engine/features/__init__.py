"""What SGLang offers besides plain generation, with QSPEC: a package, to share one server."""
