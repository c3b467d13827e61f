package software

// Instrumented with OpenTelemetry by others: their wrapper outside of
// pgadvlock, where it sees all that the program sends, and inside, where it
// sees all that reaches pgx.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"strings"
	"testing"

	xsam "github.com/XSAM/otelsql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/stdlib"
	uptrace "github.com/uptrace/opentelemetry-go-extra/otelsql"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgadvlock/pgadvlock"
)

// tracing is a provider that keeps its spans.
func tracing() (*sdktrace.TracerProvider, *tracetest.SpanRecorder) {
	recorder := tracetest.NewSpanRecorder()
	return sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)), recorder
}

// inside puts pgadvlock over a driver.
func inside(t *testing.T, d driver.Driver, dsn string, opts ...pgadvlock.Option) *sql.DB {
	t.Helper()
	base, err := d.(driver.DriverContext).OpenConnector(dsn)
	must(t, err)
	c, err := pgadvlock.WrapConnector(base, opts...)
	must(t, err)
	return sql.OpenDB(c)
}

func TestOtelsqlOutside(t *testing.T) {
	for name, open := range map[string]func(*testing.T, place, *sdktrace.TracerProvider) *sql.DB{
		"XSAM, Open": func(t *testing.T, p place, tp *sdktrace.TracerProvider) *sql.DB {
			db, err := xsam.Open("pgadvlock", p.dsn, xsam.WithTracerProvider(tp))
			must(t, err)
			return db
		},
		"XSAM, Register": func(t *testing.T, p place, tp *sdktrace.TracerProvider) *sql.DB {
			name, err := xsam.Register("pgadvlock", xsam.WithTracerProvider(tp))
			must(t, err)
			db, err := sql.Open(name, p.dsn)
			must(t, err)
			return db
		},
		"XSAM, OpenDB": func(t *testing.T, p place, tp *sdktrace.TracerProvider) *sql.DB {
			c, err := pgadvlock.NewConnector(p.dsn)
			must(t, err)
			return xsam.OpenDB(c, xsam.WithTracerProvider(tp))
		},
		"uptrace, Open": func(t *testing.T, p place, tp *sdktrace.TracerProvider) *sql.DB {
			db, err := uptrace.Open("pgadvlock", p.dsn, uptrace.WithTracerProvider(tp))
			must(t, err)
			return db
		},
		"uptrace, OpenDB": func(t *testing.T, p place, tp *sdktrace.TracerProvider) *sql.DB {
			c, err := pgadvlock.NewConnector(p.dsn)
			must(t, err)
			return uptrace.OpenDB(c, uptrace.WithTracerProvider(tp))
		},
	} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, func(t *testing.T, p place) {
				tp, spans := tracing()
				db := open(t, p, tp)
				defer db.Close()
				useInstrumented(t, p, db)
				// uptrace's OpenDB alone shows the driver that it wraps.
				if _, ok := pgadvlock.ConnectorOf(db); ok != (name == "uptrace, OpenDB") {
					t.Errorf("ConnectorOf: %t", ok)
				}
				p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.Exec("SELECT pg_advisory_lock(42)"); return err })
				if !strings.HasPrefix(name, "uptrace") {
					leak(t, p, db)
				} else {
					leakUnderHiddenHook(t, p, db)
				}
				if len(spans.Ended()) < 10 {
					t.Errorf("%d spans", len(spans.Ended()))
				}
			})
		})
	}
}

// leakUnderHiddenHook leaks a lock where the wrapper hides the return to the
// pool: it is released at the next use of the connection.
func leakUnderHiddenHook(t *testing.T, p place, db *sql.DB) {
	t.Helper()
	db.SetMaxOpenConns(1)
	conn, err := db.Conn(t.Context())
	must(t, err)
	_, err = conn.ExecContext(t.Context(), "SELECT pg_advisory_lock(42)")
	must(t, err)
	must(t, conn.Close())
	if !p.see.Held(42) {
		t.Error("released at the return: the wrapper does not hide it any more; say so in the documents")
	}
	must(t, db.Ping())
	p.nothingHeld(t)
	if got := fmt.Sprint(rules(log.take())); got != "[leaked-session-lock return-hook-hidden]" {
		t.Errorf("reported %s", got)
	}
}

// Inside, XSAM's connections show pgx's, so that nothing has to be told; of
// uptrace's the driver cannot find out what stands before the server.
func TestOtelsqlInside(t *testing.T) {
	for name, wrapper := range map[string]struct {
		shows bool
		open  func(*testing.T, place, *sdktrace.TracerProvider) driver.Driver
	}{
		"XSAM": {true, func(_ *testing.T, _ place, tp *sdktrace.TracerProvider) driver.Driver {
			return xsam.WrapDriver(stdlib.GetDefaultDriver(), xsam.WithTracerProvider(tp))
		}},
		"uptrace": {false, func(t *testing.T, p place, tp *sdktrace.TracerProvider) driver.Driver {
			db, err := uptrace.Open("pgx", p.dsn, uptrace.WithTracerProvider(tp))
			must(t, err)
			must(t, db.Close())
			return db.Driver()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, func(t *testing.T, p place) {
				dsn, set := strings.CutSuffix(p.dsn, "&pgadvlock_pool_mode=session") // pgx's own driver does not know it
				p.dsn = dsn
				var opts []pgadvlock.Option
				switch {
				case set || p.unsure && !wrapper.shows:
					opts = append(opts, pgadvlock.WithPoolMode(pgadvlock.PoolSession))
				case !wrapper.shows:
					opts = append(opts, pgadvlock.WithPoolMode(pgadvlock.PoolDirect))
				}
				tp, spans := tracing()
				db := inside(t, wrapper.open(t, p, tp), p.dsn, opts...)
				defer db.Close()
				useInstrumented(t, p, db)
				p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.Exec("SELECT pg_advisory_lock(42)"); return err })
				leak(t, p, db)
				if n := len(spans.Ended()); n < 10 {
					t.Errorf("%d spans", n)
				}
				// What a lock statement sends still goes through the wrapper; the driver's own does not.
				sent := map[string]bool{}
				for _, s := range spans.Ended() {
					for _, a := range s.Attributes() {
						sent[a.Value.Emit()] = true
					}
				}
				if !sent["SELECT pg_advisory_unlock($1)"] || wrapper.shows && sent["SELECT pg_catalog.pg_advisory_unlock_all()"] {
					t.Errorf("the wrapper saw %v", sent)
				}
				conn, err := db.Conn(t.Context())
				must(t, err)
				must(t, conn.Raw(func(c any) error {
					if pgx := c.(*pgadvlock.Conn).Conn(); (pgx != nil) != wrapper.shows {
						t.Errorf("Conn: %v", pgx)
					}
					return nil
				}))
				must(t, conn.Close())
			})
		})
	}
}

// useInstrumented is what a program does, locks and all; nothing in it is told
// off, and no error is on a span that the program did not get.
func useInstrumented(t *testing.T, p place, db *sql.DB) {
	t.Helper()
	ctx := t.Context()
	must(t, db.Ping())
	_, err := db.ExecContext(ctx, "CREATE TABLE written (n int, tags text[], at timestamptz(3), price numeric(9,2))")
	must(t, err)
	_, err = db.ExecContext(ctx, "INSERT INTO written VALUES ($1, $2, now(), $3)", 1, []string{"a", "b"}, pgtype.Numeric{Valid: true})
	must(t, err)
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	must(t, err)
	_, err = tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", 42)
	must(t, err)
	if !p.see.Held(42) {
		t.Error("not held in the transaction")
	}
	must(t, tx.Commit())
	conn, err := db.Conn(ctx)
	must(t, err)
	var got bool
	must(t, conn.QueryRowContext(ctx, "SELECT pg_try_advisory_lock($1)", 42).Scan(&got))
	if !got || !p.see.Held(42) {
		t.Error("not held on the connection")
	}
	stmt, err := conn.PrepareContext(ctx, "SELECT pg_advisory_unlock($1)")
	must(t, err)
	must(t, stmt.QueryRowContext(ctx, 42).Scan(&got))
	if !got {
		t.Error("not unlocked")
	}
	must(t, stmt.Close())
	must(t, conn.Close())
	p.nothingHeld(t)
	silent(t)
}

// columnTypes are what a program can see of columns and values.
func columnTypes(t *testing.T, db *sql.DB, query string) (lines []string) {
	t.Helper()
	conn, err := db.Conn(t.Context())
	must(t, err)
	defer conn.Close()
	rows, err := conn.QueryContext(t.Context(), query)
	must(t, err)
	defer rows.Close()
	types, err := rows.ColumnTypes()
	must(t, err)
	for _, c := range types {
		length, ok := c.Length()
		precision, scale, decimal := c.DecimalSize()
		lines = append(lines, fmt.Sprint(c.Name(), c.DatabaseTypeName(), c.ScanType(), length, ok, precision, scale, decimal))
	}
	dests := make([]any, len(types))
	for i := range dests {
		dests[i] = new(any)
	}
	for rows.Next() {
		must(t, rows.Scan(dests...))
		for _, d := range dests {
			lines = append(lines, fmt.Sprintf("%T %v", *d.(*any), *d.(*any)))
		}
	}
	return append(lines, fmt.Sprint(rows.Err()))
}

// Wrappers hide what is under them from Raw, and some do not pass arguments of
// pgx's types on. pgadvlock between such a wrapper and pgx changes nothing in
// that: what reaches it gets through.
func TestIssue_otelsqlXSAM98_uptrace121_34(t *testing.T) {
	p := here(t)
	tp, _ := tracing()
	outside := func(t *testing.T) *sql.DB {
		db, err := xsam.Open("pgadvlock", p.dsn, xsam.WithTracerProvider(tp))
		must(t, err)
		t.Cleanup(func() { db.Close() })
		return db
	}
	// Straight, and through the wrapper's own Raw.
	for name, db := range map[string]*sql.DB{"alone": p.open(t), "XSAM outside": outside(t)} {
		conn, err := db.Conn(t.Context())
		must(t, err)
		must(t, conn.Raw(func(c any) error {
			if w, ok := c.(interface{ Raw() driver.Conn }); ok {
				c = w.Raw()
			}
			raw, ok := c.(interface{ Conn() *pgx.Conn })
			if !ok || raw.Conn() == nil {
				t.Errorf("%s: Raw gives %T", name, c)
				return nil
			}
			return raw.Conn().Ping(t.Context())
		}))
		must(t, conn.Close())
		var n, m int
		must(t, db.QueryRow("SELECT cardinality($1::text[]), cardinality($2::text[])", []string{"a", "b"}, pgtype.FlatArray[string]{"c"}).Scan(&n, &m))
		if n != 2 || m != 1 {
			t.Errorf("%s: %d and %d elements", name, n, m)
		}
	}
}

// Column types, lengths, scan types are pgx's, of lock statements too, as far
// as the wrapper lets them through.
func TestIssue_otelsqlColumnTypes(t *testing.T) {
	p := here(t)
	tp, _ := tracing()
	withXSAM, err := xsam.Open("pgx", p.dsn, xsam.WithTracerProvider(tp))
	must(t, err)
	defer withXSAM.Close()
	overXSAM, err := xsam.Open("pgadvlock", p.dsn, xsam.WithTracerProvider(tp))
	must(t, err)
	defer overXSAM.Close()
	for _, query := range []string{
		"SELECT 1::int2, 'x'::varchar(7), 1.5::numeric(9,2), now()::timestamptz(3) IS NULL, ARRAY[1,2], '\\x01'::bytea",
		"SELECT pg_try_advisory_lock(1), pg_advisory_unlock(1)", "SELECT pg_advisory_lock(1) AS l, pg_advisory_unlock_all()",
	} {
		want := fmt.Sprintf("%q", columnTypes(t, withXSAM, query))
		if got := fmt.Sprintf("%q", columnTypes(t, overXSAM, query)); got != want {
			t.Errorf("%s:\n pgx: %s\nours: %s", query, want, got)
		}
	}
}

// driver.ErrSkip is no error: it is passed on, and recorded on no span.
func TestIssue_otelsqlXSAM353_556(t *testing.T) {
	p := here(t)
	ours, recorded := tracing()
	theirs, _ := tracing()
	db := inside(t, xsam.WrapDriver(bareDriver{}, xsam.WithTracerProvider(theirs)), p.dsn,
		pgadvlock.WithPoolMode(pgadvlock.PoolDirect), pgadvlock.WithTracerProvider(ours))
	defer db.Close()
	conn, err := db.Conn(t.Context())
	must(t, err)
	for range 2 {
		for _, query := range []string{"SELECT pg_try_advisory_lock(42)", "SELECT pg_advisory_unlock(42)", "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)", "SELECT 1"} {
			_, err := conn.ExecContext(t.Context(), query)
			must(t, err)
			var v any
			must(t, conn.QueryRowContext(t.Context(), strings.Replace(query, "42", "43", 1)).Scan(&v))
		}
	}
	must(t, conn.Close())
	p.nothingHeld(t)
	silent(t)
	locks := 0
	for _, s := range recorded.Ended() {
		if s.Status().Code == codes.Error || len(s.Events()) > 0 {
			t.Errorf("span %s: %v %v", s.Name(), s.Status(), s.Events())
		}
		if s.Name() == "pg_try_advisory_lock" {
			locks++
		}
	}
	if locks != 4 {
		t.Errorf("%d spans of pg_try_advisory_lock for 4 calls", locks)
	}
}

// bareDriver is pgx with none of what database/sql/driver has besides Prepare,
// so that XSAM's wrapper answers Exec and Query with driver.ErrSkip.
type bareDriver struct{}

func (bareDriver) Open(dsn string) (driver.Conn, error) {
	c, err := stdlib.GetDefaultDriver().Open(dsn)
	if err != nil {
		return nil, err
	}
	return bareConn{c}, nil
}

func (d bareDriver) OpenConnector(dsn string) (driver.Connector, error) {
	return bareConnector{d, dsn}, nil
}

type bareConnector struct {
	bareDriver
	dsn string
}

func (c bareConnector) Connect(context.Context) (driver.Conn, error) { return c.Open(c.dsn) }
func (c bareConnector) Driver() driver.Driver                        { return c.bareDriver }

type bareConn struct{ driver.Conn }
