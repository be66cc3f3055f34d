"""Request and response fields of all APIs: types, limits, and the fields of other servers."""
