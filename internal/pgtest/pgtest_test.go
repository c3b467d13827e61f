package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"
)

// TestMain also shows that servers leave no goroutine to those who look for them.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestServerIsReadySoon(t *testing.T) {
	start := time.Now()
	s := Private(t)
	took := time.Since(start)
	t.Logf("PostgreSQL %d and PgBouncer (%t) ready in %s", s.Version(), s.HasBouncer(), took.Round(time.Millisecond))
	if took > startTimeout { // a loaded machine has its time; a start that hangs does not pass
		t.Errorf("took %s", took)
	}
}

func TestPortsAreBelowTheRangeOfOutgoingConnections(t *testing.T) {
	s := Shared(t)
	own(t, s)
	ports := []int{s.Port()}
	if s.HasBouncer() {
		ports = append(ports, s.bouncer.Port(), s.Bouncer(t).Port())
	}
	for _, port := range ports {
		if port < 20000 || port > 32767 {
			t.Errorf("port %d", port)
		}
	}
}

func TestEveryAddressReachesTheDatabase(t *testing.T) {
	s := Shared(t)
	own(t, s)
	db := s.NewDB(t)
	dsns := []string{s.DSN(db), s.SocketDSN(db)}
	if s.HasBouncer() {
		for mode := range bouncerUsers {
			dsns = append(dsns, s.BouncerDSN(db, mode))
		}
	}
	for _, dsn := range dsns {
		rows, err := query(dsn, "SELECT current_database(), usesuper FROM pg_user WHERE usename = current_user")
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
		} else if got := fmt.Sprint(rows); got != fmt.Sprintf("[[%s t]]", db) {
			t.Errorf("%s: %s", dsn, got)
		}
	}
}

func TestDatabasesDoNotShareLocks(t *testing.T) {
	s := Shared(t)
	a, b := Observe(t, s.DSN(s.NewDB(t))), Observe(t, s.DSN(s.NewDB(t)))
	a.Lock(42)
	if b.Held(42) || len(b.Locks()) != 0 {
		t.Errorf("one database sees the other's: %v", b.Locks())
	}
	if !b.TryLock(42) {
		t.Error("the lock is taken in the other database")
	}
}

func TestDatabaseIsDroppedUnderItsConnections(t *testing.T) {
	s := Shared(t)
	var db string
	var conn *pgx.Conn
	t.Run("user", func(t *testing.T) {
		db = s.NewDB(t)
		var err error
		if conn, err = pgx.Connect(t.Context(), s.DSN(db)); err != nil {
			t.Fatal(err)
		}
	})
	defer conn.Close(t.Context())
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("the connection lives on")
	}
	rows, err := query(s.DSN("postgres"), "SELECT datname FROM pg_database")
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(rows, func(r []string) bool { return r[0] == db }) {
		t.Errorf("database %s is still there", db)
	}
}

func TestDatabaseNames(t *testing.T) {
	plain := regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)
	for _, test := range []string{"TestX", "TestX/sub_test#01", "FuzzÄ/" + strings.Repeat("x", 100)} {
		a, b := databaseName(test), databaseName(test)
		if a == b || !plain.MatchString(a) {
			t.Errorf("%s: %s, %s", test, a, b)
		}
	}
}

func TestWithDatabase(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/old?sslmode=disable": "new db",
		"postgresql://h?dbname=old":              "new db",
		"host=h port=1 dbname=old user=u":        "new db",
	} {
		cfg, err := pgconn.ParseConfig(withDatabase(dsn, want))
		if err != nil || cfg.Database != want || cfg.Host != "h" {
			t.Errorf("%s: %s: %v", dsn, withDatabase(dsn, want), err)
		}
	}
}

func TestObserverSeesLocksAsTheyAre(t *testing.T) {
	s := Shared(t)
	dsn := s.DSN(s.NewDB(t))
	o, other := Observe(t, dsn), Observe(t, dsn)
	const negative = int64(-42)
	other.Lock(negative)
	other.Exec("SELECT pg_advisory_lock_shared(1, -2)")

	pid := other.PID()
	want := []Lock{
		{ClassID: 1<<32 - 1, ObjID: 1<<32 - 42, ObjSubID: 1, Key: negative, Mode: "ExclusiveLock", PID: pid, Granted: true},
		{ClassID: 1, ObjID: 1<<32 - 2, ObjSubID: 2, Mode: "ShareLock", PID: pid, Granted: true},
	}
	if got := o.Locks(); !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if got, want := fmt.Sprint(o.Locks()), fmt.Sprintf("[-42 ExclusiveLock of %d (1, -2) ShareLock of %[1]d]", pid); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if !o.Held(negative) || o.Held(42) || !o.HeldPair(1, -2) || o.HeldPair(-2, 1) {
		t.Errorf("held: %v", o.Locks())
	}
	if o.TryLock(negative) {
		t.Error("took a lock that is held")
	}
	other.Unlock(negative)
	if o.Held(negative) || !o.TryLock(negative) {
		t.Error("held after its release")
	}
}

func TestObserverWaitsForAWaiter(t *testing.T) {
	s := Shared(t)
	dsn := s.DSN(s.NewDB(t))
	o, holder, waiter := Observe(t, dsn), Observe(t, dsn), Observe(t, dsn)
	holder.Lock(1)
	done := make(chan error)
	go func() {
		_, err := waiter.Conn().Exec(context.Background(), "SELECT pg_advisory_lock(1)")
		done <- err
	}()
	o.WaitFor(10*time.Second, "somebody waits", func(locks []Lock) bool {
		return slices.ContainsFunc(locks, func(l Lock) bool { return !l.Granted && l.Key == 1 })
	})
	if !o.Waiting(1) || o.Waiting(2) {
		t.Errorf("waiting: %v", o.Locks())
	}
	holder.Unlock(1)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestHelpersFailTheTest(t *testing.T) {
	o := Observe(t, Shared(t).DSN("postgres"))
	tests := map[string]func(tb testing.TB){
		"eventually": func(tb testing.TB) { Eventually(tb, time.Millisecond, "never", func() bool { return false }) },
		"wait for": func(tb testing.TB) {
			(&Observer{tb, o.conn}).WaitFor(time.Millisecond, "never", func([]Lock) bool { return false })
		},
		"unlock of what is not held": func(tb testing.TB) { (&Observer{tb, o.conn}).Unlock(1) },
		"wrong SQL":                  func(tb testing.TB) { (&Observer{tb, o.conn}).Exec("SELEKT") },
		"no such database":           func(tb testing.TB) { Observe(tb, Shared(t).DSN("nowhere")) },
	}
	for name, f := range tests {
		if got := outcome(t, f); got != "failed" {
			t.Errorf("%s: the test %s", name, got)
		}
	}
}

func TestMissingServerSkipsButFailsInCI(t *testing.T) {
	missing := fmt.Errorf("postgres %w", errNotFound)
	for _, c := range []struct {
		ci, want string
		err      error
	}{
		{"", "passed", nil},
		{"", "skipped", missing},
		{"true", "failed", missing},
		{"", "failed", errors.New("it is there, and broken")},
	} {
		t.Setenv("CI", c.ci)
		if got := outcome(t, func(tb testing.TB) { require(tb, c.err) }); got != c.want {
			t.Errorf("CI=%q, %v: %s, want %s", c.ci, c.err, got, c.want)
		}
	}
}

func TestWrongPathsAreErrors(t *testing.T) {
	for _, name := range []string{"PGADVLOCK_TEST_PGBIN", "PGADVLOCK_TEST_PGBOUNCER"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, t.TempDir())
			s, err := Start()
			if err == nil {
				s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("error %v does not name it", err)
			}
		})
	}
}

func TestMajorVersion(t *testing.T) {
	for dir, want := range map[string]int{
		"/usr/lib/postgresql/15/bin":                            15,
		"/usr/pgsql-9.6/bin":                                    9,
		"/opt/homebrew/opt/postgresql@17/bin":                   17,
		"/Applications/Postgres.app/Contents/Versions/16.4/bin": 16,
		"/usr/local/bin":                                        0,
	} {
		if got := majorVersion(dir); got != want {
			t.Errorf("%s: %d, want %d", dir, got, want)
		}
	}
}

func TestTakenPortIsTriedAgain(t *testing.T) {
	var ports []int
	err := onFreePort(func(port int) error {
		ports = append(ports, port)
		if len(ports) < 3 {
			return errors.New("bind: Address already in use")
		}
		return nil
	})
	if err != nil || len(ports) != 3 {
		t.Errorf("%v after ports %v", err, ports)
	}
	if err := onFreePort(func(int) error { return os.ErrPermission }); !errors.Is(err, os.ErrPermission) {
		t.Errorf("another error became %v", err)
	}
}

func TestBothServersRefuseATakenPort(t *testing.T) {
	s := Private(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	if s.HasBouncer() {
		if _, err := s.startBouncer([]string{"listen_port=" + strconv.Itoa(port)}); err == nil || !strings.Contains(err.Error(), "ddress already in use") {
			t.Errorf("PgBouncer: %v", err)
		}
	}
	if err := s.Stop("fast"); err != nil {
		t.Fatal(err)
	}
	if err := s.startPostgres(port); err == nil || !strings.Contains(err.Error(), "ddress already in use") {
		t.Errorf("PostgreSQL: %v", err)
	}
}

func TestPrivateServerStopsAndStartsAgain(t *testing.T) {
	s := Private(t, "application_name=hello")
	if rows, err := query(s.DSN("postgres"), "SHOW application_name"); err != nil || rows[0][0] != "hello" {
		t.Errorf("setting: %v, %v", rows, err)
	}
	db := s.NewDB(t)
	for _, mode := range []string{"smart", "fast", "immediate"} {
		pid := s.PID()
		if err := s.Stop(mode); err != nil {
			t.Fatal(err)
		}
		if err := s.Exec(db, "SELECT 1"); err == nil {
			t.Fatalf("%s: still there", mode)
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if s.PID() == pid {
			t.Errorf("%s: the same process", mode)
		}
		if err := s.Exec(db, "SELECT 1"); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
	}
	if err := s.Stop("smrat"); err == nil {
		t.Error("stopped in an unknown mode")
	}
}

func TestSharedServerIsNotStopped(t *testing.T) {
	s := Shared(t)
	if s.Stop("fast") == nil || s.Restart() == nil {
		t.Error("a test stopped it under the others")
	}
	if err := s.Exec("postgres", "SELECT 1"); err != nil {
		t.Error(err)
	}
}

func TestLogFromMark(t *testing.T) {
	s := Private(t)
	complain := func(word string) { s.Exec("postgres", "DO $$ BEGIN RAISE LOG '"+word+"'; END $$") }
	complain("before")
	mark := s.LogMark()
	complain("after")
	Eventually(t, 10*time.Second, "the line is there", func() bool {
		return strings.Contains(s.LogFrom(mark), "after")
	})
	if strings.Contains(s.LogFrom(mark), "before") || !strings.Contains(s.Log(), "before") {
		t.Errorf("mark %d in:\n%s", mark, s.Log())
	}
	if !regexp.MustCompile(`\[\d+\] postgres@postgres LOG:  after`).MatchString(s.Log()) {
		t.Errorf("no pid, user and database in:\n%s", s.Log())
	}
}

func TestFrozenBackendDoesNotAnswer(t *testing.T) {
	s := Private(t)
	o := Observe(t, s.DSN("postgres"))
	thaw := Freeze(t, int(o.PID()))
	answer := make(chan error, 1)
	go func() {
		_, err := o.Conn().Exec(context.Background(), "SELECT 1")
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Fatalf("it answered: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	thaw()
	if err := <-answer; err != nil {
		t.Error(err)
	}
}

// The bound of a stop is longer than the five seconds after which a postmaster kills what hangs.
func TestServerWithFrozenBackendEnds(t *testing.T) {
	t.Parallel()
	s, err := Start()
	require(t, err)
	o := Observe(t, s.DSN("postgres"))
	Freeze(t, int(o.PID()))
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.sandbox.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory: %v", err)
	}
}

// own skips the test on an external server.
func own(t *testing.T, s *Server) {
	t.Helper()
	if s.External() {
		t.Skip(errExternal)
	}
}

// outcome runs f as a test would, and says how that test ended.
func outcome(t *testing.T, f func(testing.TB)) string {
	r := &recorder{TB: t, outcome: "passed"}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(r)
	}()
	<-done
	return r.outcome
}

type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) end(outcome string)    { r.outcome = outcome; runtime.Goexit() }
func (r *recorder) Fatal(...any)          { r.end("failed") }
func (r *recorder) Fatalf(string, ...any) { r.end("failed") }
func (r *recorder) Skip(...any)           { r.end("skipped") }
