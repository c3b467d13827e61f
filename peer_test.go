package pgadvlock_test

// pgadvlock_dead_peer: what is set where, and that a host which vanishes frees
// its locks. The latter takes a network that can be cut.

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

const peerSettings = "SELECT current_setting('tcp_keepalives_idle') || ' ' || current_setting('tcp_keepalives_interval') || ' ' ||" +
	" current_setting('tcp_keepalives_count') || ' ' || current_setting('tcp_user_timeout') || ' ' || current_setting('client_connection_check_interval')"

func TestDeadPeerSettings(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	show := func(t *testing.T, c *sql.Conn) (s string) {
		t.Helper()
		must(t, c.QueryRowContext(ctxFor(t), peerSettings).Scan(&s))
		return s
	}
	const set = "30 10 3 60000 15s" // PostgreSQL shows those of TCP without a unit
	for _, c := range []struct {
		name, dsn string
		before    []string
		want      string // "" is unchanged
	}{
		{name: "TCP", dsn: server.DSN(name), want: set},
		{name: "unix socket", dsn: server.SocketDSN(name), want: "0 0 0 0 15s"},
		{name: "off", dsn: server.DSN(name) + "&pgadvlock_dead_peer=0"},
		{name: "in a transaction", dsn: server.DSN(name), before: []string{"BEGIN"}},
		{name: "tighter already", dsn: server.DSN(name), before: []string{"SET tcp_keepalives_idle = 5", "SET tcp_user_timeout = '7s'"}, want: "5 10 3 7000 15s"},
		{name: "looser before", dsn: server.DSN(name), before: []string{"SET tcp_keepalives_idle = '1h'", "SET client_connection_check_interval = '5min'"}, want: set},
		{name: "another time", dsn: server.DSN(name) + "&pgadvlock_dead_peer=12s", want: "6 2 3 12000 3s"},
		{name: "behind PgBouncer", dsn: server.BouncerDSN(name, "session") + simple},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := mustConn(t, openDB(t, c.dsn, &recorder{}))
			defer conn.Close()
			for _, s := range c.before {
				mustExec(t, conn, s)
			}
			before := show(t, conn)
			mustExec(t, conn, "SELECT pg_advisory_lock(1)")
			got := show(t, conn)
			if want := c.want; want == "" && got != before || want != "" && got != want {
				t.Errorf("%q, before %q, want %q", got, before, want)
			}
			mustExec(t, conn, "SELECT pg_advisory_unlock(1)")
		})
	}
	t.Run("again after DISCARD ALL", func(t *testing.T) {
		db := openDB(t, server.DSN(name), &recorder{}, discardAll)
		db.SetMaxOpenConns(1)
		must(t, onOne("SELECT pg_advisory_lock(1)")(t, db))
		conn := mustConn(t, db)
		defer conn.Close()
		if got := show(t, conn); got != set {
			t.Errorf("%q", got)
		}
	})
}

// network is a host of its own, on a cable that can be cut.
type network struct {
	namespace, cable string
	here             string // this side's address
}

// cuttable lays a cable to a network namespace. It needs root and iproute2, and
// a kernel that lets a namespace be made; elsewhere there is no host to lose.
func cuttable(t *testing.T) network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a network namespace takes root")
	}
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skip("a network namespace takes ip, from the package iproute2")
	}
	id := os.Getpid()%250 + 1
	n := network{namespace: fmt.Sprint("pgadvlock", os.Getpid()), cable: fmt.Sprint("pgal", os.Getpid()), here: fmt.Sprintf("10.213.%d.1", id)}
	there := fmt.Sprintf("10.213.%d.2", id)
	t.Cleanup(func() {
		_ = exec.Command(ip, "link", "del", n.cable).Run()
		_ = exec.Command(ip, "netns", "del", n.namespace).Run()
	})
	for _, args := range [][]string{
		{"netns", "add", n.namespace},
		{"link", "add", n.cable, "type", "veth", "peer", "name", "eth0", "netns", n.namespace},
		{"addr", "add", n.here + "/30", "dev", n.cable},
		{"link", "set", n.cable, "up"},
		{"-n", n.namespace, "addr", "add", there + "/30", "dev", "eth0"},
		{"-n", n.namespace, "link", "set", "eth0", "up"},
	} {
		if out, err := exec.Command(ip, args...).CombinedOutput(); err != nil {
			t.Skipf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	return n
}

func (n network) cut(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("ip", "-n", n.namespace, "link", "set", "eth0", "down").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestFarClient is the program on the other host: it holds one lock and takes
// or waits for another, and then does nothing for ever.
func TestFarClient(t *testing.T) {
	dsn := os.Getenv("PGADVLOCK_FAR_DSN")
	if dsn == "" {
		return // run by TestVanishedHostFreesItsLocks only
	}
	db, err := sql.Open("pgadvlock", dsn)
	must(t, err)
	conn, err := db.Conn(context.Background())
	must(t, err)
	_, err = conn.ExecContext(context.Background(), "SELECT pg_advisory_lock(41)")
	must(t, err)
	fmt.Println("holding 41")
	_, err = conn.ExecContext(context.Background(), "SELECT pg_advisory_lock(42)")
	must(t, err)
	select {}
}

func TestVanishedHostFreesItsLocks(t *testing.T) {
	t.Parallel()
	for name, far := range map[string]struct {
		params string
		waits  bool // for key 42, which somebody else holds
		freed  bool
	}{
		"holder":     {params: "pgadvlock_dead_peer=3s", freed: true},
		"waiter":     {params: "pgadvlock_dead_peer=3s", waits: true, freed: true},
		"without it": {params: "pgadvlock_dead_peer=0"},
	} {
		t.Run(name, func(t *testing.T) {
			n := cuttable(t)
			dir, err := os.MkdirTemp("/tmp", "hba")
			must(t, err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			must(t, os.Chmod(dir, 0o755)) // the server runs as another user
			hba := filepath.Join(dir, "pg_hba.conf")
			must(t, os.WriteFile(hba, []byte("local all all trust\nhost all all 0.0.0.0/0 trust\n"), 0o644))
			server := pgtest.Private(t, "listen_addresses=127.0.0.1,"+n.here, "hba_file="+hba)
			see := pgtest.Observe(t, server.DSN("postgres"))
			if far.waits {
				see.Lock(42)
			}
			dsn := fmt.Sprintf("postgres://postgres@%s:%d/postgres?sslmode=disable&%s", n.here, server.Port(), far.params)
			child := exec.Command("ip", "netns", "exec", n.namespace, os.Args[0], "-test.run=^TestFarClient$")
			child.Env = append(os.Environ(), "PGADVLOCK_FAR_DSN="+dsn)
			out, err := child.StdoutPipe()
			must(t, err)
			must(t, child.Start())
			t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })
			if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "holding 41\n" {
				t.Fatalf("the far client says %q, %v", line, err)
			}
			reached := see.Held
			if far.waits {
				reached = see.Waiting
			}
			pgtest.Eventually(t, 5*time.Second, "the far client got to its second lock", func() bool { return reached(42) })

			n.cut(t)
			start := time.Now()
			gone := func() bool { return !see.Held(41) && !see.Waiting(42) }
			if !far.freed {
				for time.Since(start) < 8*time.Second {
					if gone() {
						t.Fatal("freed without the setting: the test shows nothing")
					}
					time.Sleep(100 * time.Millisecond) // there is no event to wait for: nothing must happen
				}
				return
			}
			pgtest.Eventually(t, 15*time.Second, "the locks of the vanished host are freed", gone)
			t.Logf("freed after %s", time.Since(start).Round(100*time.Millisecond))
			if far.waits {
				see.Unlock(42)
				if see.Held(42) {
					t.Error("a dead waiter was granted the lock")
				}
			}
		})
	}
}
