package locksql

// words are the keywords that this package gives a meaning to.
var words = func() map[string]string {
	m := map[string]string{"analyse": "analyze"}
	for _, w := range []string{
		"abort", "aggregate", "all", "alter", "analyze", "and", "as", "atomic", "begin", "call", "cast",
		"characteristics", "comment", "commit", "constraint", "conversion", "copy", "create", "cross", "data",
		"deallocate", "declare", "default", "delete", "discard", "distinct", "do", "drop", "end", "event", "except",
		"execute", "exists", "explain", "extension", "fetch", "for", "from", "function", "global", "grant", "group",
		"having", "intersect", "into", "isnull", "join", "language", "lateral", "level", "limit", "local", "merge",
		"no", "notnull", "null", "offset", "only", "operator", "or", "order", "perform", "policy", "precision",
		"prepare", "prepared", "procedural", "procedure", "recursive", "references", "release", "replace", "reset",
		"returning", "revoke", "rollback", "routine", "rows", "rule", "savepoint", "security", "select", "session",
		"set", "start", "table", "temp", "temporary", "to", "transaction", "transform", "trigger", "trusted",
		"uescape", "union", "unlogged", "update", "values", "varying", "verbose", "view", "where", "window", "with",
		"work",
	} {
		m[w] = w
	}
	return m
}()

// word is the keyword a token is, in lower case; "" where it is none of these, or quoted: no keyword has quotes. It
// allocates nothing.
func (l *lexer) word(t token) string {
	var folded [16]byte
	n := t.end - t.start
	if n > len(folded) {
		return ""
	}
	for i := range n {
		folded[i] = lowerByte(l.src[t.start+i])
	}
	return words[string(folded[:n])]
}
