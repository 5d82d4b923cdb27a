"""What QSPEC does inside SGLang's scheduler, besides the passes of the target."""
