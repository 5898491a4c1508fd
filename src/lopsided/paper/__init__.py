"""The paper's tables, protocol and claims."""
