package pgadvlock_test

// The key is what the server makes of an argument: every Go type that pgx
// takes, in every mode of sending it.

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

type (
	ownInt    int32
	ownUint   uint16
	ownFloat  float64
	ownString string
	ownBytes  []byte
	named     int // has a text form, which is not its number
	nested    struct{ sql.NullInt64 }
)

func (named) String() string { return "42" }

func ptr[T any](v T) *T { return &v }

// arguments are values that a program may give for a key; of those marked
// known the ledger has to know the key, where the server takes them.
var arguments = []struct {
	value any
	known bool
}{
	{7, true}, {int8(-7), true}, {int16(7), true}, {int32(7), true}, {int64(7), true}, {int64(1) << 40, true}, {-int64(1) << 63, true},
	{uint(7), true}, {uint8(7), true}, {uint16(7), true}, {uint32(1<<32 - 1), true}, {uint64(7), true}, {uint64(1) << 63, false},
	{7.0, true}, {float32(-7), true}, {7.5, false}, {1e18, true}, {1e19, false},
	{"7", true}, {" -7 ", true}, {"+7", true}, {"0x10", true}, {"1_0", true}, {"7.0", false}, {"x", false}, {"", false},
	{[]byte("7"), false}, {[]byte{0, 0, 0, 0, 0, 0, 0, 7}, false}, {[]byte(nil), false}, {json.RawMessage("7"), false}, {json.Number("7"), true},
	{ownInt(7), true}, {ownUint(7), true}, {ownFloat(7), true}, {ownString("7"), true}, {ownBytes("7"), false}, {named(7), false}, {ptr(named(7)), false},
	{nil, true}, {(*int)(nil), true}, {ptr(7), true}, {ptr(ptr(int64(7))), true}, {ptr("7"), true}, {(*string)(nil), true}, {ptr(ownInt(7)), true},
	{sql.NullInt64{Int64: 7, Valid: true}, true}, {sql.NullInt64{}, true}, {sql.NullInt32{Int32: 7, Valid: true}, true}, {sql.NullInt16{Int16: 7, Valid: true}, true},
	{sql.NullString{String: "7", Valid: true}, true}, {sql.NullString{}, true}, {sql.NullFloat64{Float64: 7, Valid: true}, true}, {sql.Null[int]{V: 7, Valid: true}, true},
	{&sql.NullInt64{Int64: 7, Valid: true}, true}, {nested{sql.NullInt64{Int64: 7, Valid: true}}, true},
	{pgtype.Int8{Int64: 7, Valid: true}, true}, {pgtype.Int8{}, true}, {pgtype.Int4{Int32: 7, Valid: true}, true}, {pgtype.Int2{Int16: 7, Valid: true}, true},
	{pgtype.Text{String: "7", Valid: true}, true}, {pgtype.Float8{Float64: 7, Valid: true}, true}, {pgtype.Uint32{Uint32: 7, Valid: true}, true},
	{pgtype.Numeric{Int: big.NewInt(7), Valid: true}, true}, {pgtype.Numeric{Int: big.NewInt(7), Exp: 2, Valid: true}, false}, {pgtype.Bool{Bool: true, Valid: true}, false},
	{(*pgtype.Int8)(nil), true}, {big.NewInt(7), false}, {true, false}, {time.Second, true}, {time.Unix(7, 0), false}, {[]int64{7}, false}, {map[string]int{"a": 7}, false}, {struct{ A int }{7}, false},
	{(*pointerValuer)(nil), false}, {&pointerValuer{7}, true},
}

func TestKeysOfEveryGoType(t *testing.T) {
	t.Parallel()
	for mode, wire := range map[string]pgx.QueryExecMode{"cache_statement": pgx.QueryExecModeCacheStatement, "cache_describe": pgx.QueryExecModeCacheDescribe,
		"describe_exec": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple_protocol": pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode, func(t *testing.T) {
			b := setUp(t)
			conn := mustConn(t, b.db)
			defer conn.Close()
			for _, a := range arguments {
				for _, text := range []string{"SELECT pg_advisory_lock($1)", "SELECT pg_try_advisory_lock_shared($1::bigint) AS got", "SELECT pg_advisory_lock($1, -3)",
					"SELECT pg_advisory_lock($1::int::bigint)", "SELECT pg_advisory_lock(hashtextextended($1, 0))"} {
					_, err := conn.ExecContext(ctxFor(t), text, wire, a.value)
					what := fmt.Sprintf("%s with %T %v: %v", text, a.value, a.value, err)
					seen, said, exact := inPgLocks(b.see), inLedger(b.db), true
					for _, s := range sessions(b.db) {
						exact = exact && s.Exact
					}
					hashed := strings.Contains(text, "hash")
					switch {
					case !exact && err == nil && a.known && !hashed:
						t.Errorf("%s: the key is not known", what)
					case exact && !hashed && !slices.Equal(seen, said):
						t.Errorf("%s: the ledger has %v, the server %v", what, said, seen)
					case exact && hashed && len(seen) != len(said):
						t.Errorf("%s: the ledger has %v, the server %v", what, said, seen)
					}
					mustExec(t, conn, "SELECT pg_advisory_unlock_all()")
				}
			}
		})
	}
}

// Options of pgx come before the arguments, in any number; a rewriter changes
// the text, so nothing can be counted.
func TestPgxOptionsBeforeArguments(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	for _, options := range [][]any{{}, {pgx.QueryExecModeExec}, {pgx.QueryResultFormats{0}}, {pgx.QueryResultFormatsByOID{23: 0}, pgx.QueryExecModeSimpleProtocol},
		{pgx.QueryResultFormats{1}, pgx.QueryExecModeDescribeExec}} {
		query(t, conn, "SELECT pg_try_advisory_lock($1, $2)", append(options, 7, 8)...)
		if seen, said := inPgLocks(b.see), inLedger(b.db); !slices.Equal(seen, said) || len(seen) != 1 {
			t.Errorf("%v: the ledger has %v, the server %v", options, said, seen)
		}
		query(t, conn, "SELECT pg_advisory_unlock($2, $1)", append(options, 8, 7)...)
		if s := sessions(b.db); len(s) > 0 {
			t.Errorf("%v: after the unlock %+v", options, s)
		}
	}
	mustExec(t, conn, "SELECT pg_advisory_lock(@key)", pgx.NamedArgs{"key": 42})
	if s := sessions(b.db); len(s) != 1 || s[0].Exact || !b.see.Held(42) {
		t.Errorf("with NamedArgs: %+v", s)
	}
	must(t, conn.Close())
	if b.see.Held(42) {
		t.Error("with NamedArgs: held after the return")
	}
}

// query is how pgx takes all of its options; its Exec knows only some.
func query(t *testing.T, conn *sql.Conn, text string, args ...any) {
	t.Helper()
	rows, err := conn.QueryContext(ctxFor(t), text, args...)
	must(t, err)
	for rows.Next() {
	}
	must(t, errors.Join(rows.Err(), rows.Close()))
}

func sessions(db *sql.DB) []pgadvlock.Session {
	c, _ := pgadvlock.ConnectorOf(db)
	return c.Sessions()
}

// inPgLocks and inLedger list locks as "key mode", from either side.
func inPgLocks(see *pgtest.Observer) (list []string) {
	for _, l := range see.Locks() {
		key := fmt.Sprint(l.Key)
		if a, b, ok := l.Pair(); ok {
			key = fmt.Sprintf("(%d, %d)", a, b)
		}
		list = append(list, key+" "+map[string]string{"ExclusiveLock": "exclusive", "ShareLock": "share"}[l.Mode])
	}
	slices.Sort(list)
	return list
}

func inLedger(db *sql.DB) (list []string) {
	for _, s := range sessions(db) {
		for _, l := range s.Held {
			list = append(list, fmt.Sprintf("%s %s", l.Key, l.Mode))
		}
	}
	slices.Sort(list)
	return list
}
