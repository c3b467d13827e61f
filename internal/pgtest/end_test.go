//go:build unix

package pgtest

// This file owns the tests of how servers end: this test binary runs again as a
// child, which ends in all the ways that a test binary can.

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// childEnv makes TestChild the child, and tells it what to do.
const childEnv = "PGTEST_CHILD"

func TestChild(t *testing.T) {
	what := os.Getenv(childEnv)
	if what == "" {
		t.Skip("it is for the other tests")
	}
	if what == "start" {
		fmt.Println("starting")
	}
	s := Shared(t)
	db := s.NewDB(t)
	o := Observe(t, s.DSN(db))
	switch what {
	case "frozen backend":
		freeze(int(o.PID()))
	case "frozen postmaster":
		freeze(s.PID())
	case "frozen bouncer":
		freeze(s.bouncer.PID())
	}
	fmt.Println("ready", s.DSN(db))
	bufio.NewReader(os.Stdin).ReadString('\n')
	switch what {
	case "panic":
		panic("as wanted")
	case "exit":
		os.Exit(3)
	case "fatal":
		t.Fatal("as wanted")
	}
}

// child is a run of TestChild. TMPDIR is its own, so what is left of it can be seen.
type child struct {
	*exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Scanner
	stderr *bytes.Buffer
	tmp    string
	db     string // after ready
}

func startChild(t *testing.T, what string, change ...func(*exec.Cmd)) *child {
	t.Helper()
	if os.Getenv(childEnv) != "" {
		t.Skip("a child has no children")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(append(tempParents(), "/tmp")[0], "t") // short: sockets live in it
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(tmp, 0o777); err != nil {
		t.Fatal(err)
	}
	c := &child{Cmd: exec.Command(exe, "-test.run=^TestChild$", "-test.v"), stderr: new(bytes.Buffer), tmp: tmp}
	c.Env = append(os.Environ(), childEnv+"="+what, "TMPDIR="+tmp, "PGADVLOCK_TEST_DSN=")
	c.Stderr = c.stderr
	for _, f := range change {
		f(c.Cmd)
	}
	if c.stdin, err = c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.stdout = bufio.NewScanner(out)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
		c.gone(t, goneBound) // a postmaster whose directory vanishes leaves frozen backends behind
		os.RemoveAll(tmp)
	})
	return c
}

// ready waits until the child has its database, and returns its DSN.
func (c *child) ready(t *testing.T) string {
	t.Helper()
	dsn := c.until(t, "ready")
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c.db = cfg.Database
	return dsn
}

// until reads the child's output until a line begins with the word, and returns its rest.
func (c *child) until(t *testing.T, word string) string {
	t.Helper()
	var seen strings.Builder
	for c.stdout.Scan() {
		if rest, ok := strings.CutPrefix(c.stdout.Text(), word); ok {
			return strings.TrimSpace(rest)
		}
		seen.WriteString(c.stdout.Text() + "\n")
	}
	if strings.Contains(seen.String(), "--- SKIP") && os.Getenv("CI") == "" {
		t.Skip(seen.String())
	}
	c.Wait()
	t.Fatalf("no %q from the child:\n%s%s", word, seen.String(), c.stderr)
	return ""
}

// goneBound is for a loaded machine; on another it takes 0.1 s, and 5 s with a frozen backend.
const goneBound = time.Minute

// gone waits until there are no leftovers.
func (c *child) gone(t *testing.T, bound time.Duration) {
	t.Helper()
	var left []string
	if !poll(bound, func() bool { left = c.leftovers(t); return len(left) == 0 }) {
		t.Errorf("%s later there are %q", bound, left)
	}
}

// leftovers lists what there is of the child's servers: processes that name its
// directory or, as backends do, its database, and files.
func (c *child) leftovers(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("ps", "-A", "-o", "pid=,args=").Output()
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, c.tmp+"/") || c.db != "" && strings.Contains(line, c.db) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	files, err := filepath.Glob(c.tmp + "/*")
	if err != nil {
		t.Fatal(err)
	}
	return append(left, files...)
}

func TestServersEndWithTheBinary(t *testing.T) {
	for _, c := range []struct {
		what string
		end  func(*child)
	}{
		{"return", func(c *child) { c.stdin.Close() }},
		{"fatal", func(c *child) { c.stdin.Close() }},
		{"panic", func(c *child) { c.stdin.Close() }},
		{"exit", func(c *child) { c.stdin.Close() }},
		{"interrupt", func(c *child) { c.Process.Signal(syscall.SIGINT) }},
		{"kill", func(c *child) { c.Process.Kill() }},
		{"frozen backend", func(c *child) { c.Process.Kill() }}, // the postmaster kills it after five seconds
		{"frozen postmaster", func(c *child) { c.Process.Kill() }},
		{"frozen bouncer", func(c *child) { c.Process.Kill() }},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			child := startChild(t, c.what)
			child.ready(t)
			if left := child.leftovers(t); len(left) < 4 {
				t.Fatalf("that should be a server, a backend, a watchdog and a directory: %q", left)
			}
			c.end(child)
			child.Wait()
			start := time.Now()
			child.gone(t, goneBound)
			t.Logf("gone %s later", time.Since(start).Round(time.Millisecond))
		})
	}
}

// A kill may come at any moment of the start.
func TestServersEndWithABinaryKilledAtTheStart(t *testing.T) {
	for delay := time.Duration(0); delay < 800*time.Millisecond; delay += 100 * time.Millisecond {
		t.Run(delay.String(), func(t *testing.T) {
			t.Parallel()
			child := startChild(t, "start")
			child.until(t, "starting")
			time.Sleep(delay) // the moment is the point
			child.Process.Kill()
			child.Wait()
			child.gone(t, goneBound)
		})
	}
}

// A pid that was ours may be somebody else's by the time the watchdog acts.
func TestWatchdogForgetsWhatHasEnded(t *testing.T) {
	b, err := newSandbox()
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := b.start("stranger", syscall.SIGKILL, "/bin/sh", "-c", "echo up; exec sleep 600")
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.stop(syscall.SIGKILL)
	Eventually(t, 10*time.Second, "it is up", func() bool { return stranger.output(0) != "" })
	fmt.Fprintf(b.pipe, "ended %d\n", stranger.pid)
	if err := b.close(); err != nil {
		t.Error(err)
	}
	if stranger.exited() {
		t.Error("the watchdog killed a process that it was told has ended")
	}
}

func TestWatchdogIsTold(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b := &sandbox{dir: t.TempDir(), pipe: w}
	p, err := b.start("true", syscall.SIGQUIT, "/bin/sh", "-c", "true")
	if err != nil {
		t.Fatal(err)
	}
	Eventually(t, 10*time.Second, "it ends", p.exited)
	w.Close()
	got, _ := io.ReadAll(r)
	if want := fmt.Sprintf("started %d QUIT\nended %[1]d\n", p.pid); string(got) != want {
		t.Errorf("told %q, want %q", got, want)
	}
}

// "go test" waits until nobody holds its output.
func TestServersDoNotHoldTheOutput(t *testing.T) {
	t.Parallel()
	child := startChild(t, "frozen backend")
	child.ready(t)
	child.Process.Kill()
	start := time.Now()
	for child.stdout.Scan() {
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("the output ended %s later", took)
	}
}

// As root, pgtest runs servers as another user; this is what other people do.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("the other tests show it")
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Skip(err)
	}
	uid, _ := strconv.Atoi(nobody.Uid)
	gid, _ := strconv.Atoi(nobody.Gid)
	child := startChild(t, "user", func(c *exec.Cmd) {
		// The binary lies where only root looks.
		exe, err := os.ReadFile(c.Path)
		if err != nil {
			t.Fatal(err)
		}
		dir, err := os.MkdirTemp("/tmp", "t")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		c.Path, c.Dir = filepath.Join(dir, "child"), "/"
		if err := os.WriteFile(c.Path, exe, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	})
	if rows, err := query(child.ready(t), "SELECT 1"); err != nil || rows[0][0] != "1" {
		t.Errorf("%v, %v", rows, err)
	}
	child.Process.Kill()
	child.Wait()
	child.gone(t, goneBound)
}

// Neither the working directory nor TMPDIR need be open to the user that root
// runs servers as.
func TestClosedDirectories(t *testing.T) {
	t.Parallel()
	closed := filepath.Join(t.TempDir(), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	child := startChild(t, "closed", func(c *exec.Cmd) {
		c.Dir = closed
		c.Env = append(c.Env, "TMPDIR="+closed)
	})
	if rows, err := query(child.ready(t), "SELECT 1"); err != nil || rows[0][0] != "1" {
		t.Errorf("%v, %v", rows, err)
	}
	if files, _ := filepath.Glob(closed + "/*"); os.Getuid() == 0 && len(files) != 0 {
		t.Errorf("left in the closed TMPDIR: %q", files)
	}
}

func TestLongTempDirIsNotUsed(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	if err := os.Mkdir(long, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", long)
	var a *account
	dir, err := a.tempDir(func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if filepath.Dir(dir) != "/tmp" {
		t.Errorf("took %s", dir)
	}
}

func TestExternalServer(t *testing.T) {
	t.Parallel()
	s, err := Start()
	require(t, err)
	defer s.Close()
	for _, dsn := range []string{s.DSN("template1"), fmt.Sprintf("host=%s port=%d user=postgres dbname=template1 sslmode=disable", s.Host(), s.Port())} {
		child := startChild(t, "external", func(c *exec.Cmd) { c.Env = append(c.Env, "PGADVLOCK_TEST_DSN="+dsn) })
		db := child.until(t, "ready")
		rows, err := query(db, "SELECT current_database()")
		if err != nil || !strings.HasPrefix(rows[0][0], "testchild_") {
			t.Errorf("%s: %v, %v", db, rows, err)
		}
		if left := child.leftovers(t); len(left) != 0 {
			t.Errorf("it started %q", left)
		}
		child.stdin.Close()
		if err := child.Wait(); err != nil {
			t.Errorf("%s: %v", dsn, err)
		}
		if err := s.Exec(rows[0][0], "SELECT 1"); err == nil {
			t.Errorf("database %s is still there", rows[0][0])
		}
	}
}
