package integration

// Conformance: what a program can see through database/sql is on pgadvlock
// what it is on the driver underneath. The same programs run on both and say
// what they see, in lines of text; the lines are compared. What is known to
// differ is in differences, with its reason.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // programs opened by name have no logger of their own
	os.Exit(m.Run())
}

// road is a way to open a database without pgadvlock and with it.
type road struct {
	title          string
	driver         driverName
	params         string // more of the DSN, for both
	pooler         bool   // through PgBouncer in session mode
	neverPings     bool   // no connection is asked whether it is alive when it is handed out
	observing      bool   // nothing is refused or released: programs that do wrong run too
	plain, wrapped func(*testing.T, string) *sql.DB
}

type driverName string

const (
	overPgx driverName = "pgx"
	overPQ  driverName = "lib/pq"
)

func roads() []road {
	all := []road{
		{title: "pgx connector", driver: overPgx, neverPings: true,
			plain: func(t *testing.T, dsn string) *sql.DB { return stdlib.OpenDB(*parse(t, dsn), neverPing) },
			wrapped: func(t *testing.T, dsn string) *sql.DB {
				return wrap(t, stdlib.GetConnector(*parse(t, dsn), neverPing))
			}},
		{title: "pgxpool", driver: overPgx,
			plain: func(t *testing.T, dsn string) *sql.DB { return stdlib.OpenDBFromPool(openPool(t, dsn)) },
			wrapped: func(t *testing.T, dsn string) *sql.DB {
				db := wrap(t, stdlib.GetPoolConnector(openPool(t, dsn)))
				db.SetMaxIdleConns(0) // as OpenDBFromPool
				return db
			}},
		{title: "pgx, observe", driver: overPgx, observing: true, plain: byName("pgx"), wrapped: func(t *testing.T, dsn string) *sql.DB {
			return byName("pgadvlock")(t, dsn+"&pgadvlock_preset=observe")
		}},
		{title: "PgBouncer, session", driver: overPgx, pooler: true, plain: byName("pgx"), wrapped: func(t *testing.T, dsn string) *sql.DB {
			return byName("pgadvlock")(t, dsn+"&pgadvlock_pool_mode=session")
		}},
		{title: "pq", driver: overPQ, plain: byName("postgres"), wrapped: func(t *testing.T, dsn string) *sql.DB {
			base, err := pq.NewConnector(dsn)
			if err != nil {
				t.Fatal(err)
			}
			return wrap(t, base, pgadvlock.WithPoolMode(pgadvlock.PoolDirect))
		}},
	}
	for _, mode := range execModes {
		all = append(all, road{title: "pgx, " + mode, driver: overPgx, params: "&default_query_exec_mode=" + mode,
			plain: byName("pgx"), wrapped: byName("pgadvlock")})
	}
	return all
}

// neverPing keeps pgx from asking a connection that was idle for a second whether
// it is alive: how a program meets one that is not would depend on timing.
var neverPing = stdlib.OptionShouldPing(func(context.Context, stdlib.ShouldPingParams) bool { return false })

// execModes are pgx's, as its DSN parameter spells them.
var execModes = []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}

func byName(driver string) func(*testing.T, string) *sql.DB {
	return func(t *testing.T, dsn string) *sql.DB {
		db, err := sql.Open(driver, dsn)
		if err != nil {
			t.Fatal(err)
		}
		return db
	}
}

func parse(t *testing.T, dsn string) *pgx.ConnConfig {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func openPool(t *testing.T, dsn string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func wrap(t *testing.T, base driver.Connector, opts ...pgadvlock.Option) *sql.DB {
	t.Helper()
	c, err := pgadvlock.WrapConnector(base, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return sql.OpenDB(c)
}

// witness is what a program runs with, and where it says what it sees.
type witness struct {
	*testing.T
	road
	db    *sql.DB
	see   *pgtest.Observer
	name  string // of the database
	lines []string
}

// say notes an observation. The label must be the same in each run.
func (w *witness) say(label string, what ...any) {
	w.Helper()
	words := make([]string, len(what))
	for i, v := range what {
		words[i] = show(v)
	}
	line := strings.ReplaceAll(label+": "+strings.Join(words, " | "), w.name, "DB")
	w.lines = append(w.lines, ofThisRun.ReplaceAllString(line, "N"))
}

// ofThisRun are numbers that are not the same in any two runs.
var ofThisRun = regexp.MustCompile(`0x[0-9a-f]{6,}|OID [0-9]{5,}`)

// show writes a value so that two runs can be compared: with its type, and
// without addresses.
func show(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case text:
		return string(v)
	case error:
		return classify(v)
	case time.Time:
		return "time " + v.Format(time.RFC3339Nano) + " in " + v.Location().String()
	case []byte:
		return shorten(fmt.Sprintf("bytes %q", v))
	case sql.RawBytes:
		return shorten(fmt.Sprintf("raw bytes %q", []byte(v)))
	case fmt.Stringer:
		if _, isType := v.(reflect.Type); isType {
			return "type " + v.String()
		}
	}
	return shorten(fmt.Sprintf("%T %+v", v, v))
}

// text is shown as it is.
type text string

func shorten(s string) string {
	if len(s) > 300 {
		return fmt.Sprintf("%s... (%d)", s[:300], len(s))
	}
	return s
}

// sentinels are the errors that programs ask for.
var sentinels = []error{
	sql.ErrNoRows, sql.ErrTxDone, sql.ErrConnDone, driver.ErrBadConn, driver.ErrSkip,
	context.Canceled, context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF,
	pgx.ErrNoRows, pgx.ErrTxClosed, pgx.ErrTxCommitRollback,
	pgadvlock.RulePooledSessionLock, pgadvlock.RuleUnlockNotHeld,
}

// classify is what a program can tell of an error: its text, its type, which
// errors.Is and errors.As answer to it, and the server's own fields.
func classify(err error) string {
	return fmt.Sprintf("%T %q", err, err.Error()) + traits(err)
}

// traits is classify without text and type, for errors of a broken connection
// or an ended context: where in the driver they were met depends on timing.
func traits(err error) string {
	var b strings.Builder
	for _, s := range sentinels {
		if errors.Is(err, s) {
			fmt.Fprintf(&b, " is %q", s.Error())
		}
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		fields := *pg
		fields.Message, fields.Line = "", 0 // the text is shown already; the line is the server's source's
		if pg.Code == "25P02" {
			fields.Routine = "" // says in which protocol it was sent: see TestProtocolOfExec
		}
		fmt.Fprintf(&b, " pg %+v", fields)
	}
	var lp *pq.Error
	if errors.As(err, &lp) {
		fmt.Fprintf(&b, " pq %s %s %s %s %s", lp.Severity, lp.Code, lp.Detail, lp.Table, lp.Constraint)
	}
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) {
		b.WriteString(" connect")
	}
	var timeout net.Error
	if errors.As(err, &timeout) {
		fmt.Fprintf(&b, " net timeout %t", timeout.Timeout())
	}
	if pgconn.Timeout(err) {
		b.WriteString(" pgx timeout")
	}
	if pgconn.SafeToRetry(err) {
		b.WriteString(" safe to retry")
	}
	return b.String()
}

// broken tells a connection that was lost from every other outcome: how the
// loss is met (a reset, an end of file, the server's farewell) depends on timing.
func broken(err error) text {
	var opErr *net.OpError
	var state interface{ SQLState() string }
	switch {
	case err == nil:
		return "no error"
	case errors.As(err, &state) && state.SQLState() == "57P01", errors.As(err, &opErr),
		errors.Is(err, driver.ErrBadConn), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, net.ErrClosed), strings.Contains(err.Error(), "conn closed"), strings.Contains(err.Error(), "unexpected EOF"):
		return "connection lost"
	}
	return text(classify(err))
}

// sayLost notes how a lost connection shows. With lib/pq that depends on timing,
// as does which of its errors make database/sql close the connection.
func (w *witness) sayLost(label string, err error) {
	w.Helper()
	what := broken(err)
	if w.driver == overPQ && (err == nil || what == "connection lost" || errors.Is(err, sql.ErrConnDone)) {
		return
	}
	w.say(label, what)
}

// stats is the pool as database/sql counts it, once nothing is in use any more:
// a transaction whose context ended is rolled back by another goroutine. What
// database/sql closed for being over a limit is left out: a connection that the
// driver closed itself (see dropsAtReturn) is not among it.
func (w *witness) stats(label string) {
	w.Helper()
	pgtest.Eventually(w, 5*time.Second, "connections come back", func() bool { return w.db.Stats().InUse == 0 })
	s := w.db.Stats()
	w.say(label+", pool", text(fmt.Sprintf("open %d, idle %d, closed over lifetime %d", s.OpenConnections, s.Idle, s.MaxLifetimeClosed)))
}

// must ends the test over an error that would make the rest meaningless.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *witness) conn() *sql.Conn {
	w.Helper()
	c, err := w.db.Conn(w.Context())
	must(w, err)
	return c
}

// program is what someone could write with database/sql.
type program struct {
	name string
	run  func(*witness)
	only driverName // "" on all
	when func(road) bool
}

// difference is an observation that is not the same, for a reason.
type difference struct {
	program string
	labels  []string
	roads   func(road) bool // nil: all
	why     string
}

func label(line string) string {
	l, _, _ := strings.Cut(line, ": ")
	return l
}

func (d difference) covers(r road, program, line string) bool {
	return d.program == program && slices.Contains(d.labels, label(line)) && (d.roads == nil || d.roads(r))
}

func TestConformance(t *testing.T) {
	server := pgtest.Shared(t)
	for _, r := range roads() {
		t.Run(r.title, func(t *testing.T) {
			t.Parallel()
			if r.pooler {
				server.RequireBouncer(t)
			}
			plain, wrapped := server.NewDB(t), server.NewDB(t)
			for _, p := range programs() {
				if p.only != "" && p.only != r.driver || p.when != nil && !p.when(r) {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					want := run(t, p, r, r.plain, server, plain)
					got := run(t, p, r, r.wrapped, server, wrapped)
					if len(want) == 0 {
						t.Error("the program saw nothing")
					}
					for _, wrong := range compare(r, p.name, want, got) {
						t.Error(wrong)
					}
				})
			}
		})
	}
}

// run lets one program speak. What it leaves behind does not reach the next.
func run(t *testing.T, p program, r road, open func(*testing.T, string) *sql.DB, server *pgtest.Server, name string) []string {
	t.Helper()
	w := &witness{T: t, road: r, see: pgtest.Observe(t, server.DSN(name)), name: name}
	dsn := server.DSN(name)
	if r.pooler {
		dsn = server.BouncerDSN(name, "session")
	}
	w.db = open(t, dsn+r.params)
	defer w.db.Close()
	p.run(w)
	return w.lines
}

// compare returns the observations that are not the same and should be, or are
// the same and should not.
func compare(r road, program string, plain, wrapped []string) (wrong []string) {
	at := func(lines []string, i int) string {
		if i < len(lines) {
			return lines[i]
		}
		return "(nothing)"
	}
	for i := range max(len(plain), len(wrapped)) {
		p, w := at(plain, i), at(wrapped, i)
		known := slices.ContainsFunc(differences, func(d difference) bool { return d.covers(r, program, p) })
		switch {
		case p != w && !known:
			wrong = append(wrong, fmt.Sprintf("observation %d\n   plain: %s\nwrapped: %s", i, p, w))
		case p == w && known:
			wrong = append(wrong, fmt.Sprintf("observation %d is listed as a difference, and is none: %s", i, p))
		}
	}
	return wrong
}

// A connection that the driver closed is not counted among those that
// database/sql closed for being over a limit.
func TestClosedConnectionsAreNotOverTheLimit(t *testing.T) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	for driver, want := range map[string]int64{"pgx": 1, "pgadvlock": 0} {
		db := byName(driver)(t, dsn)
		defer db.Close()
		db.SetMaxIdleConns(-1)
		conn, err := db.Conn(t.Context())
		must(t, err)
		must(t, conn.Raw(func(c any) error { return c.(interface{ Conn() *pgx.Conn }).Conn().Close(t.Context()) }))
		must(t, conn.Close())
		if n := db.Stats().MaxIdleClosed; n != want {
			t.Errorf("%s: %d", driver, n)
		}
	}
}

// The suite sees what it is there to see: two drivers that are known to differ
// in what they hand out differ in every program about values.
func TestConformanceSeesDifferences(t *testing.T) {
	server := pgtest.Shared(t)
	db := server.NewDB(t)
	for _, p := range programs() {
		if p.name != "values" && p.name != "lock statements" && p.name != "errors" {
			continue
		}
		r := road{driver: overPgx}
		one := run(t, p, r, byName("pgx"), server, db)
		if wrong := compare(r, p.name, one, run(t, p, r, byName("pgx"), server, db)); len(wrong) > 0 {
			t.Errorf("%s: two runs of one driver differ: %s", p.name, wrong)
		}
		r.params = "&default_query_exec_mode=simple_protocol"
		if len(compare(r, p.name, one, run(t, p, r, byName("pgx"), server, db))) == 0 {
			t.Errorf("%s: the simple protocol looks like the extended one", p.name)
		}
	}
}

// differences are all there are.
var differences = []difference{
	{"faults", []string{
		"transaction left open, pool", "BEGIN left open, pool", "failed BEGIN left open, pool",
	}, isPgx, dropsAtReturn},
	{"faults", []string{
		"killed while idle, ping, then, pool", "killed while idle, exec, then, pool", "killed while idle, begin, then, pool", "killed while idle, prepare, then, pool",
		"killed while idle, lock and unlock, then, pool", "killed while idle, transaction lock, then, pool",
	}, func(r road) bool { return r.neverPings }, dropsAtReturn},
	{"pgx through Raw", []string{"raw, pool"}, func(r road) bool { return r.title != "pgxpool" }, dropsAtReturn},
	{"faults", []string{
		"BEGIN left open, pool", "failed BEGIN left open, pool", "failed BEGIN left open, then", "failed BEGIN left open, path",
	}, isPQ, "lib/pq hands out a connection whose transaction somebody left open"},
}

const dropsAtReturn = "a connection that is closed, busy or in a transaction leaves the pool when it comes back; pgx finds out when it is handed out again"

func isPgx(r road) bool { return r.driver == overPgx }
func isPQ(r road) bool  { return r.driver == overPQ }
