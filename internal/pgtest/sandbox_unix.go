//go:build unix

package pgtest

// This file owns processes: the account that servers run as, their directory, and
// their end, whatever ends us. It knows no more of PostgreSQL than what a signal
// does to it.

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// sandbox is where servers live: a directory, the account that they run as, and
// a watchdog that ends the servers and removes the directory when this process
// is gone, however it went.
type sandbox struct {
	dir      string
	account  *account // nil: ours
	pipe     *os.File // to the watchdog; it acts when the last writer is gone
	watchdog *exec.Cmd
}

// watchdogScript reads "started PID SIGNAL" and "ended PID" until its input ends,
// and then acts. Signals go to process groups. PostgreSQL gets QUIT, its immediate
// shutdown: KILL would leave shared memory and backends behind. Frozen backends it
// kills itself, after five seconds; a frozen group the kernel wakes when its
// parent dies. PostgreSQL's end is that of postmaster.pid: where init reaps
// nobody, the dead go on to take signals.
const watchdogScript = `
alive=
while read -r event pid signal; do
	case $event in
	started) alive="$alive $pid:$signal" ;;
	ended)
		rest=
		for p in $alive; do [ "${p%:*}" = "$pid" ] || rest="$rest $p"; done
		alive=$rest ;;
	esac
done
for p in $alive; do kill -s "${p#*:}" -- "-${p%:*}"; done
running() {
	[ -e "$1/data/postmaster.pid" ] && for p in $alive; do kill -s 0 -- "-${p%:*}" && return; done
}
i=0
while running "$1" && [ $i -lt 200 ]; do sleep 0.05; i=$((i + 1)); done
for p in $alive; do kill -s KILL -- "-${p%:*}"; done
rm -rf "$1" || rm -rf "$1" # again, if a last file came while it looked
`

// startScript tells the watchdog of itself, and becomes the program. Told by
// this process, there would be a moment in which its death leaves a server
// behind; the shell holds the pipe, so the watchdog hears of it first.
const startScript = `echo "started $$ $1" >&3; shift; exec "$@" 3>&-`

func newSandbox() (*sandbox, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	b := &sandbox{account: account}
	// A directory's watchdog is there before the directory is: a kill in between
	// would leave it behind.
	if b.dir, err = account.tempDir(func(dir string) error {
		if b.watchdog != nil {
			_ = b.close() // of a directory that would not do
			b.watchdog = nil
		}
		b.dir = dir
		return b.watch()
	}); err != nil {
		if b.watchdog != nil {
			err = errors.Join(err, b.close())
		}
		return nil, err
	}
	return b, nil
}

// watch starts the watchdog, in a process group of its own: Ctrl-C is not for it.
func (b *sandbox) watch() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	c := exec.Command("/bin/sh", "-c", watchdogScript, "pgtest-watchdog", b.dir)
	c.Dir, c.Stdin = "/", r
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		w.Close()
		return err
	}
	b.pipe, b.watchdog = w, c
	return nil
}

// close ends what still runs and removes the directory.
func (b *sandbox) close() error {
	b.pipe.Close()
	if err := b.watchdog.Wait(); err != nil {
		return fmt.Errorf("pgtest: remove %s: %w", b.dir, err)
	}
	return nil
}

func (b *sandbox) path(name string) string { return filepath.Join(b.dir, name) }

// mkdir makes a directory that the servers can write to.
func (b *sandbox) mkdir(path string) error {
	return errors.Join(os.Mkdir(path, 0o700), b.account.own(path))
}

// run runs a program to its end. It holds the pipe, so the watchdog waits for it:
// an initdb that is killed leaves shared memory behind too.
func (b *sandbox) run(path string, args ...string) error {
	p, err := b.spawn(filepath.Base(path), path, args...)
	if err != nil {
		return err
	}
	if !poll(startTimeout, p.exited) {
		return errors.Join(fmt.Errorf("pgtest: %s takes longer than %s:\n%s", path, startTimeout, p.failure()), p.stop(syscall.SIGKILL))
	}
	if p.status != 0 {
		return fmt.Errorf("pgtest: %s: exit status %d\n%s", path, p.status.ExitStatus(), p.failure())
	}
	return nil
}

// start starts a server, which the watchdog would end with the signal.
func (b *sandbox) start(name string, onDeath syscall.Signal, path string, args ...string) (*process, error) {
	signal := map[syscall.Signal]string{syscall.SIGQUIT: "QUIT", syscall.SIGKILL: "KILL"}[onDeath]
	return b.spawn(name, "/bin/sh", append([]string{"-c", startScript, "sh", signal, path}, args...)...)
}

// process is a program of the sandbox. There is no goroutine that waits for it:
// tests look for goroutines left behind.
type process struct {
	sandbox *sandbox
	name    string
	pid     int // also its process group
	log     string
	logged  int // size of the log when it started

	mu     sync.Mutex // guards the rest
	ended  bool
	status syscall.WaitStatus
}

// spawn starts a program with the pipe as descriptor 3. Its output goes to a file:
// holding our own would keep "go test" waiting.
func (b *sandbox) spawn(name, path string, args ...string) (*process, error) {
	p := &process{sandbox: b, name: name, log: b.path(name + ".log")}
	p.logged = len(p.output(0))
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	defer out.Close()
	c := exec.Command(path, args...)
	c.Dir = b.dir // ours may be closed to the other account
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.dir, "LC_ALL=C", "TZ=UTC"}
	if runtime.GOOS == "darwin" {
		c.Env[2] = "LC_ALL=en_US.UTF-8" // else "postmaster became multithreaded during startup"
	}
	c.Stdout, c.Stderr = out, out
	c.ExtraFiles = []*os.File{b.pipe}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: b.account.credential()}
	if err := c.Start(); err != nil {
		if errors.Is(err, os.ErrPermission) && b.account != nil {
			err = fmt.Errorf("%w: user %s, whom servers run as, must be able to run it", err, b.account.name)
		}
		return nil, fmt.Errorf("pgtest: %s: %w", name, err)
	}
	p.pid = c.Process.Pid
	c.Process.Release()
	return p, nil
}

// exited says whether the process has ended. Until it has been asked, the pid
// stays taken by what is left of it, so a signal cannot meet a stranger; from then
// on nobody, the watchdog neither, must signal it.
func (p *process) exited() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return true
	}
	if pid, err := syscall.Wait4(p.pid, &p.status, syscall.WNOHANG, nil); pid != p.pid && err != syscall.ECHILD {
		return false
	}
	p.ended = true
	fmt.Fprintf(p.sandbox.pipe, "ended %d\n", p.pid)
	return true
}

// stop sends the signal and waits for the end. It is nothing on an ended process.
func (p *process) stop(sig syscall.Signal) error {
	if p.exited() {
		return nil
	}
	syscall.Kill(-p.pid, sig)
	syscall.Kill(-p.pid, syscall.SIGCONT)
	if poll(stopTimeout, p.exited) {
		return nil
	}
	err := fmt.Errorf("pgtest: %s did not end within %s of signal %v:\n%s", p.name, stopTimeout, sig, p.failure())
	if sig != syscall.SIGKILL {
		err = errors.Join(err, p.stop(syscall.SIGKILL))
	}
	return err
}

const stopTimeout = 30 * time.Second

// output is what the process, and those of the same name before it, have written
// since the log was that long.
func (p *process) output(from int) string {
	b, _ := os.ReadFile(p.log) // no log: nothing written
	return string(b[min(from, len(b)):])
}

// failure is what the process itself has written, for an error.
func (p *process) failure() string { return p.output(p.logged) }

func freeze(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }
func thaw(pid int) error   { return syscall.Kill(pid, syscall.SIGCONT) }

// account is whom the servers run as instead of root, which they refuse. A nil
// account is our own.
type account struct {
	name     string
	uid, gid int
}

// serverAccount picks a user with an entry in passwd: initdb wants one.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if uidErr == nil && gidErr == nil && uid > 0 {
			return &account{name, uid, gid}, nil
		}
	}
	return nil, errors.New("pgtest: PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody to run it as")
}

func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// tempDir makes a directory that the account can use and whose path leaves room
// for a socket's name: 103 bytes in all on macOS, 107 on Linux. TMPDIR may be
// closed to another account, or long; /tmp is neither. Each path is announced
// before the directory is made.
func (a *account) tempDir(announce func(dir string) error) (string, error) {
	var errs []error
	for _, parent := range append(tempParents(), os.TempDir(), "/tmp") {
		dir := filepath.Join(parent, "pgtest"+strconv.FormatUint(rand.Uint64(), 36))
		err := announce(dir)
		if err == nil {
			err = os.Mkdir(dir, 0o700)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err = a.own(dir); err == nil {
			err = a.check(dir)
		}
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err, os.RemoveAll(dir))
	}
	return "", fmt.Errorf("pgtest: no directory for the servers; set TMPDIR to one: %w", errors.Join(errs...))
}

func (a *account) check(dir string) error {
	if longest := dir + "/pgbouncer999/.s.PGSQL.32767"; len(longest) > 103 {
		return fmt.Errorf("%s: too long a path for a socket", dir)
	}
	if a == nil {
		return nil
	}
	c := exec.Command("/bin/sh", "-c", "test -w .")
	c.Dir = dir
	c.SysProcAttr = &syscall.SysProcAttr{Credential: a.credential()}
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: closed to user %s, whom the servers run as: %w", dir, a.name, err)
	}
	return nil
}
