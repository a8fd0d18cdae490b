"""The grammar of expressions, for lark's LALR parser. The core opens no file, so it is a text in a module.

Precedence from low to high: ``or``; ``and``, ``unless``; ``not``; comparison; ``+ -``; ``* / %``; unary ``-``; ``^``; postfix. A
chain of comparisons is let through here so that its refusal can say why.
"""

GRAMMAR = r"""
?start: either

?either: both
    | either OR both                -> binary

?both: negated
    | both (AND | UNLESS) negated   -> binary

?negated: compared
    | NOT negated                   -> not_

?compared: sum
    | compared COMPARE sum          -> binary

?sum: product
    | sum (PLUS | MINUS) product    -> binary

?product: signed
    | product TIMES signed          -> binary

?signed: power
    | MINUS signed                  -> negative

?power: postfix
    | postfix POWER signed          -> binary

?postfix: atom
    | atom LSQB NUMBER RSQB                     -> window
    | atom LSQB NUMBER RSQB OFFSET NUMBER       -> window

?atom: NUMBER                       -> number
    | selector
    | call
    | LPAR either RPAR              -> parenthesis

selector: NAME [LBRACE [matcher (COMMA matcher)*] RBRACE]
matcher: NAME (EQUAL | COMPARE | REGEX) STRING

call: NAME LPAR [argument (COMMA argument)*] RPAR
?argument: either
    | selector BY NAME              -> by
    | NAME EQUAL either             -> option

OR: "or"
AND: "and"
UNLESS: "unless"
NOT: "not"
BY: "by"
OFFSET: "offset"
COMPARE: "<=" | ">=" | "==" | "!=" | "<" | ">"
REGEX: "=~" | "!~"
PLUS: "+"
MINUS: "-"
TIMES: "*" | "/" | "%"
POWER: "^"
EQUAL: "="
LPAR: "("
RPAR: ")"
LSQB: "["
RSQB: "]"
LBRACE: "{"
RBRACE: "}"
COMMA: ","
NAME: /[A-Za-z_][A-Za-z0-9_:]*/
NUMBER: /(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?/
STRING: /"[^"\\\n]*"|'[^'\\\n]*'/
COMMENT: /#[^\n]*/
WS: /[ \t\r\n]+/
%ignore WS
%ignore COMMENT
"""
