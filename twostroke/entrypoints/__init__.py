"""Launch lines of other servers, with the module's name changed."""
