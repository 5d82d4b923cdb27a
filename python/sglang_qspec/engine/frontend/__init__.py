"""What is done to requests and answers where SGLang serves clients."""
