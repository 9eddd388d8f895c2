"""Other libraries' doors to this package; each module imports the library it is named after."""
