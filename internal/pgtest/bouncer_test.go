package pgtest

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

// With two backends to choose from, two clients that are idle in turn keep one
// each in session mode, and are given the same one in the others.
func TestPoolModesDiffer(t *testing.T) {
	s := Shared(t)
	b := s.Bouncer(t, "default_pool_size=2")
	db := s.NewDB(t)
	for mode, want := range map[string]struct{ oneBackend, transactions bool }{
		"session":     {false, true},
		"transaction": {true, true},
		"statement":   {true, false},
	} {
		one, two := Observe(t, b.DSN(db, mode)), Observe(t, b.DSN(db, mode))
		pids := []uint32{one.PID(), two.PID(), one.PID(), two.PID()}
		if pids[0] != pids[2] || pids[1] != pids[3] {
			t.Errorf("%s: a client's backend changes: %v", mode, pids)
		}
		if got := pids[0] == pids[1]; got != want.oneBackend {
			t.Errorf("%s: backends %v", mode, pids)
		}
		_, err := one.Conn().Exec(t.Context(), "BEGIN")
		if got := err == nil; got != want.transactions {
			t.Errorf("%s: BEGIN: %v", mode, err)
		}
	}
}

func TestSharedBouncerHasAllModes(t *testing.T) {
	s := Shared(t)
	s.RequireBouncer(t)
	db := s.NewDB(t)
	for mode := range bouncerUsers {
		one, two := Observe(t, s.BouncerDSN(db, mode)), Observe(t, s.BouncerDSN(db, mode))
		if a, b := one.PID(), two.PID(); (a == b) != (mode != "session") {
			t.Errorf("%s: backends %d and %d", mode, a, b)
		}
	}
}

func TestBouncerOfItsOwn(t *testing.T) {
	s := Shared(t)
	b := s.Bouncer(t, "default_pool_size=1", "max_client_conn=7")
	if got := setting(t, b, "max_client_conn"); got != "7" {
		t.Errorf("max_client_conn is %s", got)
	}
	if err := b.Reload("max_client_conn=8"); err != nil {
		t.Fatal(err)
	}
	if got := setting(t, b, "max_client_conn"); got != "8" {
		t.Errorf("max_client_conn is %s after Reload", got)
	}
	if b.PID() == s.bouncer.PID() || b.Port() == s.bouncer.Port() {
		t.Error("it is the shared one")
	}
	if strings.Contains(b.Log(), strconv.Itoa(s.bouncer.Port())) || !strings.Contains(b.Log(), strconv.Itoa(b.Port())) {
		t.Errorf("not its own log:\n%s", b.Log())
	}

	o := Observe(t, b.DSN("postgres", "session"))
	b.Kill()
	if err := o.Conn().Ping(t.Context()); err == nil {
		t.Error("a connection outlived it")
	}
	if err := s.Exec("postgres", "SELECT 1"); err != nil {
		t.Errorf("the server went with it: %v", err)
	}
}

func TestBouncersShareAPort(t *testing.T) {
	s := Shared(t)
	one := s.Bouncer(t, "so_reuseport=1")
	two := s.Bouncer(t, "so_reuseport=1", "listen_port="+strconv.Itoa(one.Port()))
	clients := func(b *Bouncer) int {
		rows, err := b.Console("SHOW CLIENTS")
		if err != nil {
			t.Fatal(err)
		}
		return len(rows)
	}
	Eventually(t, 30*time.Second, "both get clients", func() bool {
		Observe(t, one.DSN("postgres", "session"))
		return clients(one) > 1 && clients(two) > 1 // the console's own is one
	})
}

func TestBouncerRefusesNonsense(t *testing.T) {
	s := Shared(t)
	s.RequireBouncer(t)
	for _, conf := range []string{"default_pool_size", "no_such_setting=1"} {
		if _, err := s.startBouncer([]string{conf}); err == nil {
			t.Errorf("%q passed", conf)
		}
	}
}

func setting(t *testing.T, b *Bouncer, name string) string {
	t.Helper()
	rows, err := b.Console("SHOW CONFIG")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		if row[0] == name {
			return row[1]
		}
	}
	return ""
}
