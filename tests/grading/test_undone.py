"""An answer that leaves the operation undone, or repeats the question, is wrong; a value in another form is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.grading.grader import Grader, GradeTask, try_grade
from vlm_rl.grading.undone import unfinished
from vlm_rl.templates import TEMPLATES

PLAIN = TEMPLATES["plain"]
NUMBERS = st.integers(2, 999)
# (gold, answer, whether it is right)
ANSWERS = [
    ('5, 1', '3\\pm2', False),
    ('5, 1', 'x=\\frac{6\\pm4}{2}', False),
    ('2+\\sqrt3, 2-\\sqrt3', '2\\pm\\sqrt3', True),
    ('3\\pm2', '3\\pm2', True),
    ('3, -3', '\\pm3', True),
    ('55', '1+2+\\dots+10=55', True),
    ('55', 'S=1+2+...+10=55', True),
    ('120', '1\\cdot2\\cdots5=120', False),  # no operator before the dots: what they leave out is open
    ('55', '1+2+\\dots+10', False),
    ('55', '1+2+\\dots+10=45', False),
    ('55', '54.9\\dots=55', False),
    ('2x', '\\frac{\\partial}{\\partial x}x^2', False),
    ('5/6', '0.5+\\frac13', False),
    ('1/2', '0+\\frac12', False),
    ('-3/2', '-2+\\frac12', False),
    ('-3/2', '-1\\frac12', True),
    ('5', '2+3', False),
    ('6', '\\gcd(12,18)', False),
    ('2', '17 \\pmod 5', False),
    ('2x', '\\frac{d}{dx}x^2', False),
    ('2', '\\lim_{x\\to 0}\\frac{\\sin 2x}{x}', False),
    ('120', '\\prod_{k=1}^5 k', False),
    ('80', '37+43', False),
    ('5', '|3-8|', False),
    ('7/3', '2+\\frac13', True),
    ('5/6', '\\frac12+\\frac13', False),
    ('1/3', '\\int_0^1 x^2 dx', False),
    ('\\{1,2\\}', '\\{2-1,2\\}', False),
    ('12', '3(4)', False),
    ('12', '(3)(4)', False),
    ('14', '2(3+4)', False),
    ('25', '5*5', False),
    ('25', '3^2+4^2', False),
    ('2', '17-5\\cdot3', False),
    ('1/2', '0.25+0.25', False),
    ('9', '\\frac{3\\cdot 6}{2}', False),
    ('3', '\\sqrt{4+5}', False),
    ('x=3', 'x-3=0', False),
    ('x=3', '3', True),
    ('3', 'x=3', True),
    ('x=3', '5x-15=0', False),
    ('3', '3=3', False),
    ('x=3', '3=3', False),
    ('3', '1+2=3', True),
    ('5x-15=0', 'x=3', False),
    ('5x-15=0', '3', False),
    ('2x+1=7', 'x=3', False),
    ('x=3', 'x+0=3', False),
    ('x=3', '2x=6', False),
    ('x=3', 'x=6/2', True),
    ('x=3', 'x=2+1', False),
    ('x=1/2', '2x=1', False),
    ('x=3', '(x-3)=0', False),
    ('x=3', 'x/3=1', False),
    ('x=3', '-x=-3', False),
    ('x=3', '3x-2x=3', False),
    ('y=3', 'y-3=0', False),
    ('AB=5', '2AB=10', False),
    ('y=2x+3', '2x-y+3=0', True),
    ('2x+1=5', '2x=4', True),
    ('x=3', '3=x', True),
    ('x=3', '3.0=3', False),
    ('x=3', '3.0', True),
    ('x=3', 'x=3.0', True),
    ('x=3', '2+1=x', False),
    ('5', '5=|3-8|', True),
    ('5', '2+3=1+4', False),
    ('5', '17-12=5', True),
    ('1591', '37\\times43=1591', True),
    ('1591', '1591=37\\times43', True),
    ('1591', 'x=37\\times 43', False),
    ('1591', '37\\cdot43', False),
    ('-6', '37-43', False),
    ('-6', '-6', True),
    ('1000', '10^3', True),
    ('1000', '1{,}000', True),
    ('3/4', '0.75', True),
    ('2\\sqrt2', '\\sqrt8', True),
    ('1024', '2^{10}', True),
    ('1023', '2^{10}-1', True),
    ('120', '5!', True),
    ('10', '\\binom52', True),
    ('4\\pi', '\\pi\\cdot4', True),
    ('0.5', '50\\%', True),
    ('-1\\frac12', '-(1+\\frac12)', True),
    ('3.5', '3\\frac12', True),
    ('6\\times10^5', '600000', True),
    ('600000', '6\\times10^5', True),
    ('600000', '6\\cdot10^5', True),
    ('600000', '600\\times1000', False),
    ('7', '3!+1', True),
    ('3+2i', '2i+3', True),
    ('3+2i', '(1+2)+2i', False),
    ('\\frac{1+\\sqrt5}{2}', '\\frac12+\\frac{\\sqrt5}{2}', True),
    ('x^2-1', '(x-1)(x+1)', True),
    ('x+5', 'x+2+3', False),
    ('6x', '2\\cdot3x', False),
    ('(5,2)', '(2+3,2)', False),
    ('(5,2)', '(5,2)', True),
    ('1, 2', '2-1, 2', False),
    ('x>3', 'x>2+1', False),
    ('[-1,3]', '[-1,1+2]', False),
    ('\\begin{pmatrix}3\\\\4\\end{pmatrix}', '\\begin{bmatrix}3\\\\4\\end{bmatrix}', True),
    ('55', '\\frac{10\\cdot 11}{2}', False),
    ('55', '\\sum_{k=1}^{10} k = 55', True),
    ('1591', '\\boxed{37 \\times 43}', False),
    ('1591', '(37)(43)', False),
    ('1591', '37 \\ast 43', False),
    ('1591', '37(43)', False),
    ('\\frac{1}{12}', '\\frac13\\cdot\\frac14', False),
    ('\\frac{1}{12}', '\\frac{1}{3\\cdot4}', False),
    ('\\frac{1}{12}', '\\frac13-\\frac14', False),
    ('12', '12.0', True),
    ('4', '12\\div3', True),
    ('120^\\circ', '180^\\circ-60^\\circ', False),
    ('120', '180^\\circ-60^\\circ=120^\\circ', True),
    ('\\frac{100!}{97!}', '100\\cdot99\\cdot98', False),
    ('2', '\\log_2 4', True),
    ('1/2', '\\sin 30^\\circ', True),
    ('5\\sqrt2', '5\\cdot\\sqrt2', True),
    ('30', '2\\cdot3\\cdot5', False),
    ('40', '2^3\\cdot5', True),
    ('x=2+\\sqrt3', 'x=\\sqrt3+2', True),
    ('5', '10-5', False),
    ('5', '10-(5)', False),
    ('5', '8+(-3)', False),
    ('11', '1+10', False),
    ('e^2', 'e\\cdot e', True),
    ('2\\cdot3', '3\\cdot2', True),
    ('1+2', '2+1', True),
    ('x_1=2,x_2=3', '2,3', True),
    ('7', '7\\text{ apples}', True),
    ('k\\pi, k\\in\\mathbb{Z}', 'x=n\\pi (n\\in Z)', True),
    ('\\frac{\\pi}{4}+k\\pi, k\\in\\mathbb{Z}', '\\frac{\\pi}{4}+n\\pi, n\\in\\mathbb{Z}', True),
    ('f(x)=2x+1', '2x+1', True),
    ('y=2x+3', 'y = 3+2x', True),
    ('\\frac{\\pi}{3}', '\\frac{2\\pi}{6}', True),
    ('\\frac{\\pi}{3}', '\\frac{\\pi}{2}-\\frac{\\pi}{6}', False),
    ('0.12', '12\\times 10^{-2}', True),
    ('x=3', 'x=1+2=3', True),
    ('6', '\\mathrm{lcm}(2,3)', False),
    ('x \\equiv 2 \\pmod 5', 'x \\equiv 2 \\pmod{5}', True),
    ('(x-1)^2+(y+2)^2=9', '(x-1)^2+(y+2)^2=9', True),
    ('x^2+y^2=25', 'x^2+y^2=16+9', False),
    ('3:4', '6:8', True),
    ('-\\frac{3}{2}', '\\frac{-3}{2}', True),
    ('1+i', '\\frac{2}{1-i}', True),
    ('2\\sqrt{3}-1', '-1+2\\sqrt3', True),
    ('\\frac{3}{2}', '1+\\frac12', True),
    ('\\frac32', '2-\\frac12', False),
    ('100', '10\\cdot10', False),
    ('100', '10^2', True),
    ('0', 'x-x', True),
    ('0', '5-5', False),
    ('391', '20^2-3^2', False),
    ('12\\pi', '16\\pi-4\\pi', False),
    ('120', '5\\cdot4!', False),
    ('5\\sqrt2', '2\\sqrt2+3\\sqrt2', False),
    ('5\\sqrt{2}', '2\\sqrt{2} + 3\\sqrt{2}', False),
    ('2+\\sqrt3', '\\sqrt3+2', True),
    ('2+\\sqrt3', '2+\\sqrt{3}', True),
    ('1+\\pi', '\\pi+1', True),
    ('96', '3\\cdot2^5', True),
    ('119', '5!-1', True),
    ('400', '20^2', True),
    ('108', '2^2\\cdot3^3', True),
    ('5', '\\sqrt{25}', True),
    ('5', '\\sqrt{3^2+4^2}', False),
    ('\\frac{\\pi}{4}', '\\pi/4', True),
    ('\\frac{3\\pi}{4}', '\\pi-\\frac{\\pi}{4}', False),
    ('\\frac{3\\pi}{4}', '\\frac{\\pi}{2}+\\frac{\\pi}{4}', False),
    ('3+2\\sqrt2', '(1+\\sqrt2)^2', True),
    ('3\\sqrt{2}+2\\sqrt{3}', '2\\sqrt3+3\\sqrt2', True),
    ('7\\sqrt3', '\\sqrt{3}+6\\sqrt{3}', False),
    ('7\\sqrt3', '\\sqrt{147}', True),
    ('\\sqrt2+\\sqrt8', '3\\sqrt2', True),
    ('3\\sqrt2', '\\sqrt2+\\sqrt8', False),
    ('24', '4\\cdot3!', False),
    ('720', '6\\cdot5!', False),
    ('720', '6!', True),
    ('15', '2^4-1^2', False),
    ('1', '3^2-2^3', False),
    ('5', '2^2+1^3', False),
    ('126', '5!+3!', False),
    ('12', '\\binom{12}{1}', True),
    ('15', '\\binom{5}{2}+\\binom{5}{1}', True),
    ('5e', '2e+3e', False),
    ('12\\pi', '4\\pi\\cdot3', False),
    ('12\\pi', '\\pi\\cdot12', True),
    ('x^2+5x', '2x+3x+x^2', True),
    ('4+2i', '2i+4', True),
    ('7', '2^2+3', False),
    ('1025', '2^{10}+1', True),
    ('63', '2^6-1', True),
    ('18', '3\\cdot(2+4)', False),
    ('2^{10}-1', '2^9+2^9-1', True),
    ('3072', '3\\cdot2^{10}', True),
    ('3072', '2^{10}\\cdot3', True),
    ('72', '2^3 3^2', True),
    ('91/216', '1-(\\frac56)^3', True),
    ('91/216', '1-\\left(\\frac{5}{6}\\right)^3', True),
    ('1', '\\left(\\frac35\\right)^2+\\left(\\frac45\\right)^2', False),
    ('7257600', '2\\cdot10!', True),
    ('12', '2(3!)', False),
    ('120', '(5)(4!)', False),
    ('120', '5\\times 4!', False),
    ('120', '5*4!', False),
    ('144', '4!\\cdot3!', False),
    ('10', '\\frac{5!}{2!3!}', True),
    ('10', '\\frac{5!}{2!\\cdot 3!}', True),
    ('10', '\\frac{5!}{3!(5-3)!}=10', True),
    ('5\\cdot4!', '5\\cdot 4!', True),
    ('5!', '5\\cdot4!', True),
    ('0', '\\pi-\\pi', False),
    ('5\\ln2', '2\\ln2+3\\ln2', False),
    ('\\ln6', '\\ln2+\\ln3', True),
    ('\\frac{1+\\sqrt5}{2}', '\\frac{\\sqrt5+1}{2}', True),
    ('2\\sqrt5', '\\sqrt5+\\sqrt5', False),
    ('\\frac{3\\sqrt3}{4}', '\\sqrt3-\\frac{\\sqrt3}{4}', False),
    ('4\\pi', '\\frac{16\\pi-4\\pi}{3}', False),
    ('x=5\\sqrt2', 'x=2\\sqrt2+3\\sqrt2', False),
    ('5\\sqrt2', '2\\sqrt2+3\\sqrt2=5\\sqrt2', True),
    ('5\\sqrt2', '5\\sqrt2=2\\sqrt2+3\\sqrt2', True),
    ('(5\\sqrt2, 1)', '(2\\sqrt2+3\\sqrt2, 1)', False),
    ('3^{10}-2^{10}', '3^{10}-2^{10}', True),
    ('58025', '3^{10}-2^{10}', True),
    ('65', '3^4-2^4', False),
    ('240', '3^5-3', True),
    ('\\sqrt{13}', '\\sqrt{2^2+3^2}', False),
    ('5\\sqrt{2}', '\\sqrt{7^2+1^2}', False),
    ('13\\pi', '\\pi(2^2+3^2)', False),
    ('13\\pi', '4\\pi+9\\pi', False),
    ('13\\pi', '(4+9)\\pi', False),
    ('5i', '2i+3i', False),
    ('2+3i', '3i+2', True),
    ('x^2+9', 'x^2+3^2', True),
    ('\\frac{3^{10}-1}{2}', '\\frac{3^{10}-1}{2}', True),
    ('29524', '\\frac{3^{10}-1}{2}', True),
    ('2\\pi+3\\sqrt3', '3\\sqrt3+2\\pi', True),
    ('\\frac{\\pi}{3}+2k\\pi, k\\in\\mathbb{Z}', '2k\\pi+\\frac{\\pi}{3}, k\\in\\mathbb{Z}', True),
    ('180', '6\\cdot30', False),
    ('45', '\\binom{10}{2}', True),
    ('35', '\\binom{10}{2}-10', True),
    ('1-\\frac{1}{2^{10}}', '1-2^{-10}', True),
    ('1023/1024', '1-\\frac{1}{2^{10}}', True),
    ('3/4', '1-\\frac{1}{2^2}', True),
    ('13/36', '\\frac{1}{2^2}+\\frac{1}{3^2}', False),
    ('-2', '\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}', False),
    ('-2', '\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}', False),
    ('-2', '\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}=-2', True),
    ('5', '\\max(3,5)', False),
    ('5', '\\min(5,8)', False),
    ('5', '\\max(3,5)=5', True),
    ('5', 'f_{\\max}=5', True),
    ('f_{\\max}=5', 'f_{\\max}=2+3', False),
    ('\\det(A)=5', '2+3', False),
    ('5', '\\lfloor\\frac{16}{3}\\rfloor', False),
    ('6', '\\lceil 16/3\\rceil', False),
    ('\\lfloor n/2\\rfloor', '\\left\\lfloor\\frac{n}{2}\\right\\rfloor', True),
    ('5', '|3+4i|', False),
    ('5', '\\lvert -5\\rvert', False),
    ('\\sqrt2-1', '|1-\\sqrt2|', False),
    ('5', '|3+4i|=5', True),
    ('5', '|AB|=5', True),
    ('2|x|', '2\\lvert x\\rvert', True),
    ('\\{1,2,3\\}', '\\{1,2\\}\\cup\\{2,3\\}', False),
    ('\\{1,2,3\\}', '\\{1,2\\}\\cup\\{2,3\\}=\\{1,2,3\\}', True),
    ('1, 2, 3', '\\{1,2\\}\\cup\\{2,3\\}', False),
    ('(0,3)', '(0,2)\\cup(1,3)', False),
    ('0<x<3', '(0,2)\\cup(1,3)', False),
    ('x>0', 'x\\in(0,1]\\cup(1,\\infty)', False),
    ('\\mathbb{R}', '(-\\infty,0)\\cup[0,\\infty)', False),
    ('(0,1)\\cup(2,4)', '(0,1)\\cup(2,3)\\cup[3,4)', False),
    ('(0,1)\\cup(2,3)\\cup[3,4)', '(0,1)\\cup(2,4)', True),
    ('x\\ne 2', '(-\\infty,2)\\cup(2,\\infty)', True),
    ('\\{x\\mid x<1, x>3\\}', '(-\\infty,1)\\cup(3,\\infty)', True),
    ('|x|>1', '(-\\infty,-1)\\cup(1,\\infty)', True),
    ('x<1 or x>3', '(3,\\infty)\\cup(-\\infty,1)', True),
    ('\\mathbb{R}\\setminus\\{2\\}', '(-\\infty,2)\\cup(2,\\infty)', True),
]  # fmt: skip
# (question, gold, answer, whether it is right)
QUESTIONS = [
    ('Simplify the ratio 4:6.', '2:3', '4:6', False),
    ('Simplify the ratio 4 to 6.', '2:3', '4:6', False),
    ('Write $10:15:20$ in simplest form.', '2:3:4', '10:15:20', False),
    ('化简 8:6', '4:3', '8:6', False),
    ('The sides are as 2:3. The perimeters?', '2:3', '2:3', True),
    ('Of 8 cats and 12 dogs, what is the ratio?', '2:3', '8:12', True),
    ('The train leaves at 04:30. When?', '4:30', '04:30', True),
    ('Compute $\\max(5,6)$.', '6', '\\max(5,6)', False),
    ('Find $\\lfloor 3.7 \\rfloor$.', '3', '\\lfloor 3.7\\rfloor', False),
    ('Find $\\begin{vmatrix}2&0\\\\0&3\\end{vmatrix}$.', '6', '\\begin{vmatrix}2&0\\\\0&3\\end{vmatrix}', False),
    ('Evaluate $\\log_2 8$.', '3', '\\log_2(8)', False),
    ('Simplify $2x+3x$.', '5x', '3x+2x', False),
    ('Simplify $x^2 \\cdot x^3$.', 'x^5', 'x^2x^3', False),
    ('Simplify $x^2 \\cdot x^3$.', 'x^5', 'y=x^3x^2', False),
    ('Simplify \\(\\sqrt{8}+\\sqrt{18}\\).', '5\\sqrt2', '\\sqrt{18}+\\sqrt8', False),
    ('Simplify $\\frac{x^2-9}{x-3}$.', 'x+3', '(x^2-9)/(x-3)', False),
    ('Simplify $\\frac{x^2-9}{x-3}$.', 'x+3', '3+x', True),
    ('Let $f(x)=x^2-9$. Write it with factors.', '(x+3)(x-3)', '(x-3)(x+3)', True),
    ('Write $z=3+4i$ for $\\bar z=3-4i$.', '3+4i', '4i+3', True),
    ('Is it $-x+3$ or $x-3$?', '3-x', '-x+3', True),
    ('Is it $-x+3$ or $x-3$?', '3-x', 'y=-x+3', True),
    ('Which fraction is $2/6$?', '1/3', '\\frac13', True),
    ('Expand $(x+1)^2$.', 'x^2+2x+1', 'x(x+2)+1', False),
    ('Expand $(x+1)^2+(x-1)^2$.', '2x^2+2', '(x-1)^2+(x+1)^2', False),
    ('Compute 2^{10}.', '1024', '2^{10}', False),
    ('Compute $5!$.', '120', '5!', False),
    ('Simplify \\frac{8}{12}.', '2/3', '\\frac{8}{12}', False),
    ('Simplify $\\sqrt{8}$.', '2\\sqrt2', '\\sqrt{8}', False),
    ('What is \\sin 30^\\circ?', '1/2', '\\sin 30^\\circ', False),
    ('Factor x^2-1.', '(x-1)(x+1)', 'x^2-1', False),
    ('Factor x^2-1.', '(x-1)(x+1)', '(x+1)(x-1)', True),
    ('Factorise x^3-x completely', 'x(x-1)(x+1)', 'x(x^2-1)', False),
    ('Factor 3x+6', '3(x+2)', '3x+6', False),
    ('Factor x^2-1.', '(x-1)(x+1)', '-1+x^2', False),
    ('Expand (x-1)(x+1)', 'x^2-1', '(x-1)(x+1)', False),
    ('Expand (x+1)^2', 'x^2+2x+1', '(x+1)^2', False),
    ('Expand (x+1)^2', 'x^2+2x+1', '1+2x+x^2', True),
    ('Write 40 as a product of primes; give the prime factorization', '2^3\\cdot5', '40', False),
    ('prime factorization of 40', '2^3\\cdot5', '2\\cdot2\\cdot2\\cdot5', True),
    ('prime factorization of 40', '2^3\\cdot5', '8\\cdot5', False),
    ('Simplify x+x.', '2x', 'x+x', False),
    ('Rewrite 2x-y+3=0 in slope-intercept form', 'y=2x+3', '2x-y+3=0', False),
    ('Line y=2x+3 meets the axis. Give the line.', 'y=2x+3', '2x+3', True),
    ('Heads has probability 1/2. How likely is tails?', '0.5', '1/2', True),
    ('Half of 50\\%?', '0.25', '25\\%', True),
    ('A side is \\sqrt{2}. The other?', '\\frac{2}{\\sqrt2}', '\\sqrt{2}', True),
    ('Solve 2x+1>7.', 'x>3', '2x+1>7', False),
    ('Evaluate \\log_2 8', '3', '\\log_2 8', False),
    ('Compute \\binom{5}{2}.', '10', '\\binom{5}{2}', False),
    ('Compute |{-5}|', '5', '5', True),
    ('f(x)=x+1; find f(x) again', '1+x', 'x+1', True),
    ('Simplify (x^2-1)/(x-1).', 'x+1', 'x+1', True),
    ('Simplify (x^2-1)/(x-1).', 'x+1', '(x^2-1)/(x-1)', False),
    ('Compute $37\\times 43$', '1591', '37\\times43', False),
    ('Evaluate 3^2+4^2', '25', '3^2+4^2', False),
    ('There are 3 factors of 2, what is x?', '4', '4', True),
    ('What is 2/4 in lowest terms', '1/2', '2/4', False),
    ('Interval (1,3)?', '1<x<3', '(1,3)', True),
    ('计算 2^{10}', '1024', '2^{10}', False),
    ('分解因式 x^2-4', '(x-2)(x+2)', 'x^2-4', False),
]  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as grader:
        yield grader


def test_an_undone_operation_and_an_unsolved_equation_are_wrong(grader: Grader) -> None:
    tasks = [GradeTask(rf"\boxed{{{answer}}}", gold, infer_answer_type(gold), PLAIN) for gold, answer, _ in ANSWERS]
    seen = [grade.correct for grade in grader.grade_many(tasks)]
    assert [case for case, correct in zip(ANSWERS, seen, strict=True) if correct != case[2]] == []


def test_matrices_are_added_and_multiplied_and_multiples_stay(grader: Grader) -> None:
    one, two, square = _matrix("1", "2"), _matrix("3", "4"), _matrix("1&2", "3&4")
    cases = [
        (_matrix("4", "6"), f"{one}+{two}", False),
        (_matrix("4", "6"), f"{one}+{two}={_matrix('4', '6')}", True),
        (_matrix("7", "10"), f"{one}+2{two}", False),
        (_matrix("7", "10"), rf"2{two}+\frac{{1}}{{1}}{one}", False),
        (_matrix("5", "11"), f"{square}{one}", False),
        (_matrix("7&10", "15&22"), rf"{square}\cdot {square}", False),
        (_matrix("6", "8"), f"2{two}", True),
        (_matrix("1+3t", "2+4t"), f"{one}+t{two}", True),
        (f"{one}+t{two}", f"t{two}+{one}", True),
    ]
    tasks = [GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN) for gold, answer, _ in cases]
    seen = [grade.correct for grade in grader.grade_many(tasks)]
    assert [case for case, correct in zip(cases, seen, strict=True) if correct != case[2]] == []


def _matrix(*rows: str) -> str:
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


def test_an_expression_of_the_question_is_no_answer(grader: Grader) -> None:
    tasks = [
        GradeTask(rf"\boxed{{{answer}}}", gold, infer_answer_type(gold), PLAIN, question=question)
        for question, gold, answer, _ in QUESTIONS
    ]
    seen = [grade.correct for grade in grader.grade_many(tasks)]
    assert [case for case, correct in zip(QUESTIONS, seen, strict=True) if correct != case[3]] == []


@given(NUMBERS, NUMBERS, st.sampled_from([r"\times", r"\cdot", "+", "-", "*"]))
def test_two_numbers_and_a_sign_are_no_value(first: int, second: int, sign: str) -> None:
    value = {"+": first + second, "-": first - second}.get(sign, first * second)
    left = f"{first}{sign} {second}"
    for answer, correct in ((left, False), (f"x={left}", False), (f"{left}={value}", True), (f"{value}", True)):
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", str(value), "integer", PLAIN), {}, {})
        assert grade is not None and grade.correct == correct, (answer, grade)


@given(st.integers(2, 99), st.integers(2, 99), st.sampled_from([2, 3, 5, 6, 7, 10]))
def test_like_roots_are_added_and_different_ones_stay(first: int, second: int, radicand: int) -> None:
    root = rf"\sqrt{{{radicand}}}"
    other = r"\sqrt{11}"
    for gold, answer, correct in (
        (f"{first + second}{root}", f"{first}{root}+{second}{root}", False),
        (f"{first + second}{root}", f"{first}{root}+{second}{root}={first + second}{root}", True),
        (f"{first}{root}+{second}{other}", f"{second}{other}+{first}{root}", True),
        (rf"{first + second}\pi", rf"{first}\pi+{second}\pi", False),
        (rf"{first}+{second}\pi", rf"{second}\pi+{first}", True),
    ):
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, {})
        assert grade is not None and grade.correct == correct, (gold, answer, grade)


@given(st.integers(2, 30), st.integers(4, 12), st.integers(1, 9))
def test_squares_are_subtracted_and_high_powers_stay(base: int, exponent: int, offset: int) -> None:
    for value, answer, correct in (
        ((base + offset) ** 2 - base**2, f"{base + offset}^2-{base}^2", False),
        (base**exponent - offset, f"{base}^{{{exponent}}}-{offset}", True),
        (offset * base**exponent, rf"{offset}\cdot{base}^{{{exponent}}}", True),
    ):
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", str(value), "integer", PLAIN), {}, {})
        assert grade is not None and grade.correct == correct, (answer, grade)


@given(NUMBERS, NUMBERS, st.integers(-99, 99))
def test_an_equation_to_be_solved_is_no_solution(factor: int, offset: int, root: int) -> None:
    for answer in (f"{factor}x+{offset}={factor * root + offset}", f"{factor}x={factor * root}"):
        for gold, given_answer in ((f"x={root}", answer), (answer, f"x={root}"), (answer, str(root))):
            grade = try_grade(GradeTask(rf"\boxed{{{given_answer}}}", gold, "expression", PLAIN), {}, {})
            assert grade is not None and grade.verdict == "wrong", (gold, given_answer, grade)


def test_published_rules_and_texts_accept_what_is_undone() -> None:
    for task in (
        GradeTask(r"\boxed{37\times43}", "1591", "integer", PLAIN, allows_undone=True),
        GradeTask(r"\boxed{2+3}", "2 + 3", "text", PLAIN),
        GradeTask(r"\boxed{37\times43}", ("1591", r"37\times 43"), "integer", PLAIN),
    ):
        grade = try_grade(task, {}, {})
        assert grade is not None and grade.correct, task


def test_several_boxes_may_show_the_operation_and_its_value() -> None:
    grade = try_grade(GradeTask(r"\boxed{37\times43} is \boxed{1591}", "1591", "integer", PLAIN), {}, {})
    assert grade is not None and grade.correct


@pytest.mark.parametrize("text", ["(" * 4000 + "1+1", "1+" * 3900, "{" * 8000, "x_" * 4000, "2^{3}" * 1500])
def test_a_long_answer_is_not_read(text: str) -> None:
    assert unfinished("5", text, "What is it?") == "undone"
    assert unfinished(text, f"{text}0", "") is None
