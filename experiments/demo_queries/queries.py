"""Sixteen texts that a person might type, two for each domain of the text demo.

They were written, and committed, before the demo was run on any of them, and are not to be changed to please it. The demo's settings were
chosen on `development`'s texts.
"""

QUERIES: tuple[tuple[str, str], ...] = (
    ("medicine", "Blood samples were taken from forty women before surgery and again three days after it."),
    ("medicine", "The mutation was found in most of the tumours, and it predicts a poor response to chemotherapy."),
    ("film-reviews", "My wife and I watched this last night and we both thought the ending was awful."),
    ("film-reviews", "One of the best horror movies of the eighties, with a great soundtrack and real scares."),
    ("code-sympy", "x = Symbol('x', positive=True)\nassert solve(x**2 - 4, x) == [2]\n"),
    ("code-sympy", "from sympy.matrices import Matrix\nM = Matrix([[1, 2], [3, 4]])\nprint(M.det())\n"),
    ("speeches", "We must cut taxes for working families and create new jobs for the American people."),
    ("speeches", "I recommend that Congress make an appropriation for the improvement of our harbors and the Navy."),
    ("books", '"I don\'t believe a word of it," she said, and turned away from him to the window.'),
    ("books", "The old count went up to the drawing room, where several officers were waiting for him."),
    ("code-django", "from django.urls import path\nurlpatterns = [path('login/', LoginView.as_view())]\n"),
    (
        "code-django",
        "if request.method == 'POST' and form.is_valid():\n    form.save()\n    return redirect('index')\n",
    ),
    ("law", "The court held that the defendant was liable."),
    ("law", "You may copy and distribute this program, provided that you keep this copyright notice in every copy."),
    ("scripture", "And it came to pass in those days that the king sent messengers unto the prophet."),
    ("scripture", "Then Jesus said to his disciples, Whoever believes in me shall not die but have eternal life."),
)
