package locksql

import (
	"math"
	"strconv"
	"strings"
)

// From arguments to keys: a call's arguments are values that are known when it is read, or when its parameters are.

// KeyKind is how much of a key is known.
type KeyKind uint8

const (
	KeyNumber     KeyKind = iota // the numbers
	KeyExpression                // the expression and the values in it: the same ones make the same key
	KeyNull                      // NULL: the functions are strict, nothing is locked
	KeyUnknown                   // nothing, or the server will refuse it
)

// Key is what a call locks. Two keys that are equal, of kind KeyNumber or KeyExpression, are one lock of one database.
type Key struct {
	Space    Space
	Kind     KeyKind
	Bigint   int64    // Space Bigint, KeyNumber
	Pair     [2]int32 // Space Pair, KeyNumber
	Expr     string   // KeyExpression and KeyUnknown: the masked expression, of a pair "a, b"
	Identity string   // KeyExpression: the expression with the values of its parameters. Never shown to anyone
}

// String is the key without the value of any string: "42", "(1, 9527)", "hashtext($1)", "NULL".
func (k Key) String() string {
	s := k.Expr
	switch k.Kind {
	case KeyNull:
		return "NULL"
	case KeyNumber:
		if k.Space == Bigint {
			return strconv.FormatInt(k.Bigint, 10)
		}
		s = strconv.Itoa(int(k.Pair[0])) + ", " + strconv.Itoa(int(k.Pair[1]))
	}
	if k.Space == Pair && s != "" {
		s = "(" + s + ")"
	}
	return s
}

// Key evaluates the call's key. arg gives the value of $n: nil for NULL, an int64, or a string, the text form of
// anything else; ok is false when it is not known. The key of UnlockAll is KeyUnknown.
func (c *Call) Key(arg func(n int) (value any, ok bool)) Key {
	k := Key{Space: c.Space}
	if len(c.Args) == 0 {
		k.Kind = KeyUnknown
		return k
	}
	limit := uint8(64)
	if c.Space == Pair {
		limit = 32
	}
	null := false
	for i := range c.Args {
		kind, n := c.Args[i].value.eval(limit, arg)
		if c.Space == Pair {
			k.Pair[i] = int32(n)
		} else {
			k.Bigint = n
		}
		null = null || kind == KeyNull
		k.Kind = max(k.Kind, kind)
	}
	if null {
		k.Kind = KeyNull
	}
	if k.Kind == KeyNumber {
		return k
	}
	k.Bigint, k.Pair = 0, [2]int32{}
	if k.Kind == KeyNull {
		return k
	}
	exprs := make([]string, len(c.Args))
	identities := make([]string, len(c.Args))
	for i := range c.Args {
		a := &c.Args[i]
		exprs[i] = a.Expr
		switch kind, n := a.value.eval(limit, arg); kind {
		case KeyNumber:
			exprs[i] = strconv.FormatInt(n, 10)
			identities[i] = exprs[i]
		case KeyExpression:
			var ok bool
			if identities[i], ok = a.identity(arg); !ok {
				k.Kind = KeyUnknown
			}
		}
	}
	k.Expr = strings.Join(exprs, ", ")
	if k.Kind == KeyExpression {
		k.Identity = strings.Join(identities, ", ")
	}
	return k
}

// valueKind is what an argument is.
type valueKind uint8

const (
	isUnknown valueKind = iota // not readable, or an integer the server will refuse
	isNumber
	isText // a literal whose type the server has yet to choose
	isNull
	isParam
	isExpression
	isUnsure // an expression that may be NULL although its parameters are not
)

// value is what can be known of an argument before its parameters are.
type value struct {
	kind  valueKind
	bits  uint8   // the narrowest integer type it was cast to: 16, 32, 64; 0 is none
	param int     // isParam
	num   integer // isNumber
	text  string  // isText, else empty
}

// integer is a number with sign; its magnitude may be one beyond int64.
type integer struct {
	neg bool
	mag uint64
}

// fits reports whether i is a value of the integer type with that many bits.
func (i integer) fits(bits uint8) bool {
	limit := uint64(1) << (bits - 1)
	return i.mag < limit || i.neg && i.mag == limit
}

func (i integer) int64() int64 {
	if i.neg {
		return -int64(i.mag)
	}
	return int64(i.mag)
}

// eval returns the kind of key the value makes in a slot of that many bits, and the number.
func (v value) eval(limit uint8, arg func(int) (any, bool)) (KeyKind, int64) {
	switch v.kind {
	case isNull:
		return KeyNull, 0
	case isExpression:
		return KeyExpression, 0
	case isParam:
		switch a, ok := arg(v.param); a := a.(type) {
		case nil:
			if ok {
				return KeyNull, 0
			}
		case int64:
			v.num = integer{neg: a < 0, mag: uint64(a)}
			if a < 0 {
				v.num.mag = -v.num.mag
			}
			v.kind = isNumber
		case string:
			v.kind, v.text = isText, a
		}
		if v.bits != 0 {
			limit = min(limit, v.bits)
		}
	}
	if num, ok := parseInteger(v.text); ok {
		v.kind, v.num = isNumber, num
	}
	if v.kind != isNumber || !v.num.fits(limit) {
		return KeyUnknown, 0
	}
	return KeyNumber, v.num.int64()
}

// cast is v::type, bits the width of an integer type and 0 for any other.
func (v value) cast(bits uint8) value {
	switch {
	case v.kind == isNull, v.kind == isUnsure, v.kind == isUnknown:
		return v
	case bits == 0:
		return value{kind: isExpression}
	case v.kind == isText:
		num, ok := parseInteger(v.text)
		if !ok {
			return value{}
		}
		v = value{kind: isNumber, num: num}
	}
	if v.bits == 0 || bits < v.bits {
		v.bits = bits
	}
	if !v.num.fits(bits) {
		return value{}
	}
	return v
}

// minus is -v. Of a parameter it is an expression: its type is the server's choice.
func (v value) minus() value {
	switch v.kind {
	case isNumber:
		v.num.neg = !v.num.neg
		if v.bits != 0 && !v.num.fits(v.bits) {
			return value{}
		}
		return v
	case isNull, isUnsure, isUnknown:
		return v
	}
	return value{kind: isExpression}
}

// parseInteger reads s as int8in of PostgreSQL 16 does: spaces around it, a sign, 0x, 0o, 0b, underscores. Earlier
// servers refuse the latter, and then no lock is taken. The range is not checked.
func parseInteger(s string) (integer, bool) {
	i, end := 0, len(s)
	for i < end && isSpace(s[i]) {
		i++
	}
	for i < end && isSpace(s[end-1]) {
		end--
	}
	var n integer
	if i < end && (s[i] == '-' || s[i] == '+') {
		n.neg = s[i] == '-'
		i++
	}
	s = s[i:end]
	is, base, leading := isDigit, uint64(10), false
	if len(s) > 1 && s[0] == '0' {
		if r := radixDigit(s[1]); r != nil {
			is, base, leading = r, map[byte]uint64{'x': 16, 'o': 8, 'b': 2}[lowerByte(s[1])], true
			s = s[2:]
		}
	}
	if s == "" || digits(s, 0, is, leading) != len(s) {
		return integer{}, false
	}
	for j := range len(s) {
		c := lowerByte(s[j])
		if c == '_' {
			continue
		}
		d := uint64(c - '0')
		if c >= 'a' {
			d = uint64(c-'a') + 10
		}
		if n.mag > (math.MaxUint64-d)/base {
			return integer{neg: n.neg, mag: math.MaxUint64}, true
		}
		n.mag = n.mag*base + d
	}
	return n, true
}
