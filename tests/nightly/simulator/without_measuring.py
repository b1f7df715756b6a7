"""The kernels of a module whose source has had everything removed that measures: what they were before they could."""

import ast
import inspect
import linecache


class _Remover(ast.NodeTransformer):
    """Removes each branch of MEASURE, and what nothing else may use: a parameter, and the functions that measure."""

    def visit_ImportFrom(self, node):
        return None if node.module == "scaler_triton.kernels.measure" else node

    def visit_If(self, node):
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "MEASURE" else node

    def visit_arguments(self, node):
        node.args = [arg for arg in node.args if arg.arg != "measured_ptr"]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        node.args = [arg for arg in node.args if ast.unparse(arg) != "measured_ptr"]
        return node

    def visit_List(self, node):  # in a decorator
        node.elts = [each for each in node.elts if ast.unparse(each) != "'measured_ptr'"]
        return node


def without_measuring(module):
    """The names of such a module."""
    source = ast.unparse(_Remover().visit(ast.parse(inspect.getsource(module))))
    assert "measured_ptr" not in source
    file = f"<{module.__name__} without measuring>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton asks for the source
    names = {"__name__": file}
    exec(compile(source, file, "exec"), names)
    return names
