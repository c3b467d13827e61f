package integration

// Drivers that lack what came into database/sql/driver later, or have more than
// pgx: the calls that reach them are those that database/sql alone would make.
// No server is needed to ask that, so the drivers here only write down what is
// asked of them.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/pgadvlock/pgadvlock"
)

// script is what a fake driver was asked and what its caller got.
type script struct{ lines []string }

func (s *script) add(format string, args ...any) {
	s.lines = append(s.lines, fmt.Sprintf(format, args...))
}

type point struct{ X, Y int } // a type that no default converter takes

// bare is a driver.Conn and nothing more.
type bare struct {
	s    *script
	stmt func(bareStmt) driver.Stmt
}

func (c bare) Prepare(query string) (driver.Stmt, error) {
	c.s.add("  Prepare %s", query)
	if strings.HasPrefix(query, "BAD") {
		return nil, errors.New("syntax error")
	}
	s := bareStmt{c.s, query}
	if c.stmt != nil {
		return c.stmt(s), nil
	}
	return s, nil
}

func (c bare) Close() error { c.s.add("  Close"); return nil }

func (c bare) Begin() (driver.Tx, error) {
	c.s.add("  Begin")
	return fakeTx{c.s}, nil
}

type fakeTx struct{ s *script }

func (t fakeTx) Commit() error   { t.s.add("  Commit"); return errors.New("commit fails") }
func (t fakeTx) Rollback() error { t.s.add("  Rollback"); return nil }

type bareStmt struct {
	s     *script
	query string
}

func (s bareStmt) NumInput() int { return strings.Count(s.query, "$") }
func (s bareStmt) Close() error  { s.s.add("  Stmt.Close"); return nil }

func (s bareStmt) Exec(args []driver.Value) (driver.Result, error) {
	s.s.add("  Stmt.Exec %#v", args)
	return driver.RowsAffected(1), nil
}

func (s bareStmt) Query(args []driver.Value) (driver.Rows, error) {
	s.s.add("  Stmt.Query %#v", args)
	return &bareRows{s: s.s, query: s.query}, nil
}

// bareRows are one row of as many columns as the text has commas, and one more.
type bareRows struct {
	s     *script
	query string
	done  bool
}

func (r *bareRows) Columns() []string {
	return slices.Repeat([]string{"c"}, 1+strings.Count(r.query, ","))
}
func (r *bareRows) Close() error { r.s.add("  Rows.Close"); return nil }

func (r *bareRows) Next(dest []driver.Value) error {
	if r.done {
		return io.EOF
	}
	r.done = true
	for i := range dest {
		dest[i] = true
	}
	return nil
}

// Pieces that a connection may have besides.

type oldQueryer struct{ s *script }

func (q oldQueryer) Query(query string, args []driver.Value) (driver.Rows, error) {
	q.s.add("  Query %s %#v", query, args)
	if strings.Contains(query, "skip") {
		return nil, driver.ErrSkip
	}
	return &bareRows{s: q.s, query: query}, nil
}

type oldExecer struct{ s *script }

func (e oldExecer) Exec(query string, args []driver.Value) (driver.Result, error) {
	e.s.add("  Exec %s %#v", query, args)
	if strings.Contains(query, "skip") {
		return nil, driver.ErrSkip
	}
	return driver.RowsAffected(1), nil
}

type newQueryer struct{ s *script }

func (q newQueryer) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	q.s.add("  QueryContext %s %#v", query, args)
	if strings.Contains(query, "skip") {
		return nil, driver.ErrSkip
	}
	return &bareRows{s: q.s, query: query}, ctx.Err()
}

type newExecer struct{ s *script }

func (e newExecer) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	e.s.add("  ExecContext %s %#v", query, args)
	if strings.Contains(query, "skip") {
		return nil, driver.ErrSkip
	}
	return driver.RowsAffected(1), ctx.Err()
}

type newPreparer struct{ bare }

func (p newPreparer) PrepareContext(_ context.Context, query string) (driver.Stmt, error) {
	p.s.add("  PrepareContext")
	return p.Prepare(query)
}

type newBeginner struct{ s *script }

func (b newBeginner) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	b.s.add("  BeginTx %+v", opts)
	if err := ctx.Err(); err != nil { // a transaction would be rolled back some time later
		return nil, err
	}
	return fakeTx(b), nil
}

type pinger struct{ s *script }

func (p pinger) Ping(context.Context) error { p.s.add("  Ping"); return errors.New("no answer") }

type resetter struct{ s *script }

func (r resetter) ResetSession(context.Context) error { r.s.add("  ResetSession"); return nil }

type badResetter struct{ s *script }

func (r badResetter) ResetSession(context.Context) error {
	r.s.add("  ResetSession")
	return driver.ErrBadConn
}

type validator struct {
	s     *script
	valid bool
}

func (v validator) IsValid() bool { v.s.add("  IsValid"); return v.valid }

type checker struct {
	s   *script
	who string
}

func (c checker) CheckNamedValue(nv *driver.NamedValue) error {
	c.s.add("  %s.CheckNamedValue %d %s %#v", c.who, nv.Ordinal, nv.Name, nv.Value)
	switch v := nv.Value.(type) {
	case point:
		nv.Value = fmt.Sprint(v)
		return nil
	case bool:
		return driver.ErrRemoveArgument
	case string:
		return driver.ErrSkip
	case float64:
		return errors.New("no floats")
	}
	return nil
}

type newStmt struct{ bareStmt }

func (s newStmt) ExecContext(_ context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.s.add("  Stmt.ExecContext %#v", args)
	return driver.RowsAffected(1), nil
}

func (s newStmt) QueryContext(_ context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.s.add("  Stmt.QueryContext %#v", args)
	return &bareRows{s: s.s, query: s.query}, nil
}

// converter is driver.ColumnConverter's.
type converter struct{ bareStmt }

func (c converter) ColumnConverter(i int) driver.ValueConverter {
	c.s.add("  ColumnConverter %d", i)
	return driver.String
}

type anyNumber struct{ bareStmt }

func (anyNumber) NumInput() int { return -1 }

// fakes are connections with every combination that asks for another fallback.
var fakes = map[string]func(*script) driver.Conn{
	"bare": func(s *script) driver.Conn { return bare{s: s} },
	"queryer": func(s *script) driver.Conn {
		return struct {
			bare
			oldQueryer
		}{bare{s: s}, oldQueryer{s}}
	},
	"execer": func(s *script) driver.Conn {
		return struct {
			bare
			oldExecer
		}{bare{s: s}, oldExecer{s}}
	},
	"queryerContext": func(s *script) driver.Conn {
		return struct {
			bare
			newQueryer
		}{bare{s: s}, newQueryer{s}}
	},
	"execerContext": func(s *script) driver.Conn {
		return struct {
			bare
			newExecer
		}{bare{s: s}, newExecer{s}}
	},
	"both, old and new": func(s *script) driver.Conn {
		return struct {
			bare
			oldQueryer
			oldExecer
			newQueryer
			newExecer
		}{bare{s: s}, oldQueryer{s}, oldExecer{s}, newQueryer{s}, newExecer{s}}
	},
	"preparer": func(s *script) driver.Conn { return newPreparer{bare{s: s}} },
	"beginner": func(s *script) driver.Conn {
		return struct {
			bare
			newBeginner
		}{bare{s: s}, newBeginner{s}}
	},
	"pinger": func(s *script) driver.Conn {
		return struct {
			bare
			pinger
		}{bare{s: s}, pinger{s}}
	},
	"resetter": func(s *script) driver.Conn {
		return struct {
			bare
			resetter
		}{bare{s: s}, resetter{s}}
	},
	"bad resetter": func(s *script) driver.Conn {
		return struct {
			bare
			badResetter
		}{bare{s: s}, badResetter{s}}
	},
	"validator": func(s *script) driver.Conn {
		return struct {
			bare
			validator
		}{bare{s: s}, validator{s, true}}
	},
	"never valid": func(s *script) driver.Conn {
		return struct {
			bare
			validator
			resetter
		}{bare{s: s}, validator{s, false}, resetter{s}}
	},
	"conn checks": func(s *script) driver.Conn {
		return struct {
			bare
			checker
			newQueryer
			newExecer
		}{bare{s: s}, checker{s, "Conn"}, newQueryer{s}, newExecer{s}}
	},
	"conn checks, old": func(s *script) driver.Conn {
		return struct {
			bare
			checker
			oldQueryer
			oldExecer
		}{bare{s: s}, checker{s, "Conn"}, oldQueryer{s}, oldExecer{s}}
	},
	"stmt checks": func(s *script) driver.Conn {
		return bare{s, func(b bareStmt) driver.Stmt {
			return struct {
				bareStmt
				checker
			}{b, checker{s, "Stmt"}}
		}}
	},
	"only prepares, both check": func(s *script) driver.Conn {
		return struct {
			bare
			checker
		}{bare{s, func(b bareStmt) driver.Stmt {
			return struct {
				newStmt
				checker
			}{newStmt{b}, checker{s, "Stmt"}}
		}}, checker{s, "Conn"}}
	},
	"stmt with context": func(s *script) driver.Conn { return bare{s, func(b bareStmt) driver.Stmt { return newStmt{b} }} },
	"stmt converts":     func(s *script) driver.Conn { return bare{s, func(b bareStmt) driver.Stmt { return converter{b} }} },
	"only prepares, stmt converts, conn checks": func(s *script) driver.Conn {
		return struct {
			bare
			checker
		}{bare{s, func(b bareStmt) driver.Stmt { return converter{b} }}, checker{s, "Conn"}}
	},
	"stmt takes any number": func(s *script) driver.Conn { return bare{s, func(b bareStmt) driver.Stmt { return anyNumber{b} }} },
}

// fakeConnector has one kind of connection.
type fakeConnector struct {
	s    *script
	make func(*script) driver.Conn
}

func (c fakeConnector) Connect(context.Context) (driver.Conn, error) { return c.make(c.s), nil }
func (c fakeConnector) Driver() driver.Driver                        { return nil }

// legacyProgram calls all of database/sql, with texts that have the word in
// them.
func legacyProgram(s *script, db *sql.DB, word string, arguments [][]any) {
	db.SetMaxOpenConns(1)
	ctx := context.Background()
	over, cancel := context.WithCancel(ctx)
	cancel()
	do := func(what string, err error) { s.add("%s: %v", what, err) }
	conn, err := db.Conn(ctx)
	do("conn", err)
	for _, ctx := range []context.Context{ctx, over} {
		for _, query := range []string{"SELECT " + word, "SELECT $ " + word, "skip $ " + word, "BAD " + word} {
			for _, args := range arguments {
				label := fmt.Sprintf("%s %v %t", query, args, ctx == over)
				result, err := conn.ExecContext(ctx, query, args...)
				do("exec "+label, err)
				if err == nil {
					n, err := result.RowsAffected()
					do(fmt.Sprint("affected ", n), err)
				}
				rows, err := conn.QueryContext(ctx, query, args...)
				do("query "+label, err)
				describe(s, rows)
				stmt, err := conn.PrepareContext(ctx, query)
				do("prepare "+label, err)
				if err != nil {
					continue
				}
				_, err = stmt.ExecContext(ctx, args...)
				do("prepared exec "+label, err)
				rows, err = stmt.QueryContext(ctx, args...)
				do("prepared query "+label, err)
				describe(s, rows)
				do("close", stmt.Close())
			}
		}
		for _, opts := range []*sql.TxOptions{nil, {Isolation: sql.LevelSerializable}, {ReadOnly: true}} {
			tx, err := conn.BeginTx(ctx, opts)
			do("begin", err)
			if err != nil {
				continue
			}
			_, err = tx.ExecContext(ctx, "SELECT "+word)
			do("in it", err)
			do("commit", tx.Commit())
			tx, err = conn.BeginTx(ctx, opts)
			do("begin", err)
			if err == nil {
				do("rollback", tx.Rollback())
			}
		}
		do("ping", conn.PingContext(ctx))
	}
	do("raw", conn.Raw(func(any) error { return nil }))
	do("conn close", conn.Close())
	for range 2 {
		_, err = db.Exec("SELECT " + word)
		do("db exec", err)
		stmt, err := db.Prepare("SELECT " + word)
		do("db prepare", err)
		if err == nil {
			_, err = stmt.Exec()
			do("db prepared exec", err)
			do("close", stmt.Close())
		}
	}
	stats := db.Stats()
	s.add("open %d, idle %d", stats.OpenConnections, stats.Idle)
	do("close", db.Close())
}

func describe(s *script, rows *sql.Rows) {
	if rows == nil {
		return
	}
	defer rows.Close()
	types, err := rows.ColumnTypes()
	s.add("types %v", err)
	for _, t := range types {
		length, ok := t.Length()
		precision, scale, decimal := t.DecimalSize()
		nullable, known := t.Nullable()
		s.add("%s %q %v %d %t %d %d %t %t %t", t.Name(), t.DatabaseTypeName(), t.ScanType(), length, ok, precision, scale, decimal, nullable, known)
	}
	for rows.Next() {
		dest := make([]any, len(types))
		for i := range dest {
			dest[i] = new(any)
		}
		s.add("scan %v", rows.Scan(dest...))
		for _, d := range dest {
			s.add("%v", reflect.ValueOf(d).Elem().Interface())
		}
	}
	s.add("another %t", rows.NextResultSet())
	s.add("end %v", rows.Err())
}

// legacy runs the program on a fake, alone and wrapped.
func legacy(t *testing.T, make func(*script) driver.Conn, word string, arguments [][]any) (plain, wrapped *script) {
	plain, wrapped = &script{}, &script{}
	legacyProgram(plain, sql.OpenDB(fakeConnector{plain, make}), word, arguments)
	legacyProgram(wrapped, wrap(t, fakeConnector{wrapped, make}, pgadvlock.WithPoolMode(pgadvlock.PoolDirect)), word, arguments)
	return plain, wrapped
}

func compareScripts(t *testing.T, plain, wrapped []string) {
	t.Helper()
	for i := range max(len(plain), len(wrapped)) {
		p, w := "(nothing)", "(nothing)"
		if i < len(plain) {
			p = plain[i]
		}
		if i < len(wrapped) {
			w = wrapped[i]
		}
		if p != w {
			before := plain[max(0, min(i, len(plain))-4):min(i, len(plain))]
			t.Fatalf("line %d of %d after\n%s\n   plain: %s\nwrapped: %s", i, len(plain), strings.Join(before, "\n"), p, w)
		}
	}
}

// everyday are arguments that database/sql converts by itself.
var everyday = [][]any{{}, {1}, {"x"}, {true}, {1.5}, {sql.Named("n", 1)}, {1, "x"}, {nil}}

// A driver that lacks an optional interface is asked what database/sql itself
// would ask it, call by call.
func TestFallbacksAreThoseOfDatabaseSQL(t *testing.T) {
	for name, make := range fakes {
		if strings.HasPrefix(name, "only prepares") {
			continue // see TestArgumentsOfDriversThatOnlyPrepare
		}
		t.Run(name, func(t *testing.T) {
			plain, wrapped := legacy(t, make, "1", everyday)
			compareScripts(t, plain.lines, wrapped.lines)
		})
	}
}

// A driver without Queryer and Execer sees arguments only with their statement,
// whose own checker or converter decides about them.
func TestArgumentsOfDriversThatOnlyPrepare(t *testing.T) {
	for name, make := range fakes {
		switch make(&script{}).(type) {
		//lint:ignore SA1019 what old drivers have
		case driver.Queryer, driver.Execer, driver.QueryerContext, driver.ExecerContext:
			continue
		}
		t.Run(name, func(t *testing.T) {
			plain, wrapped := legacy(t, make, "1", append([][]any{{point{1, 2}}, {uint64(1 << 63)}, {1, point{3, 4}}}, everyday...))
			compareScripts(t, plain.lines, wrapped.lines)
		})
	}
}

// asked tells the lines of what a driver was asked from those of what the caller
// got.
func asked(line string) bool { return strings.HasPrefix(line, "  ") }

// A transaction lock is sent as any other statement. What the caller gets from a
// session lock is the same too; the calls are not: an Exec of a try needs its
// row, and the return needs a release.
func TestFallbacksOfLockStatements(t *testing.T) {
	for name, make := range fakes {
		if strings.HasPrefix(name, "only prepares") {
			continue // as above
		}
		for word, arguments := range map[string][][]any{
			"pg_advisory_xact_lock($1)":                      everyday,
			"pg_advisory_lock(1), pg_advisory_unlock(1)":     {{}},
			"pg_try_advisory_lock(1), pg_advisory_unlock(1)": {{}},
		} {
			t.Run(name+", "+word, func(t *testing.T) {
				plain, wrapped := legacy(t, make, word, arguments)
				if !strings.Contains(word, "xact") {
					plain.lines, wrapped.lines = slices.DeleteFunc(plain.lines, asked), slices.DeleteFunc(wrapped.lines, asked)
				}
				compareScripts(t, plain.lines, wrapped.lines)
			})
		}
	}
}
