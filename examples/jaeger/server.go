package main

// This file owns the Jaeger process: its ports, when it is ready, and its end.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"
)

// jaeger is a running Jaeger with its traces in memory.
type jaeger struct {
	query    string // URL of the query API and of the pages
	otlpGRPC string // URL for OTEL_EXPORTER_OTLP_ENDPOINT with OTEL_EXPORTER_OTLP_PROTOCOL=grpc
	otlpHTTP string // the same with http/protobuf

	process  *exec.Cmd
	watchdog *exec.Cmd
	log      *tail
	ended    chan struct{} // closed when the process has ended
}

// errNoJaeger is what startJaeger returns when it is not told where Jaeger is.
var errNoJaeger = errors.New("PGADVLOCK_JAEGER is not set: scripts/jaeger sets it, as make jaeger and make test-jaeger use it")

// startTimeout bounds the start, on a machine that has much else to do; on
// another it takes a second.
const startTimeout = 2 * time.Minute

// startJaeger starts the Jaeger that scripts/jaeger names, and waits until it
// answers. It ends with stop, and in any case with this process.
func startJaeger(ctx context.Context) (*jaeger, error) {
	program, config := os.Getenv("PGADVLOCK_JAEGER"), os.Getenv("PGADVLOCK_JAEGER_CONFIG")
	if program == "" || config == "" {
		return nil, errNoJaeger
	}
	for range 5 {
		j, err := start(ctx, program, config)
		if err == nil || !strings.Contains(err.Error(), "address already in use") {
			return j, err
		}
	}
	return nil, errors.New("jaeger: no four free ports")
}

func start(ctx context.Context, program, config string) (*jaeger, error) {
	ports, err := freePorts(4)
	if err != nil {
		return nil, err
	}
	url := func(i int) string { return "http://127.0.0.1:" + strconv.Itoa(ports[i]) }
	j := &jaeger{query: url(0), otlpGRPC: url(2), otlpHTTP: url(3), log: &tail{}, ended: make(chan struct{})}
	j.process = exec.Command(program, "--config", config)
	j.process.Env = os.Environ()
	for i, name := range []string{"JAEGER_QUERY_PORT", "JAEGER_QUERY_GRPC_PORT", "JAEGER_OTLP_GRPC_PORT", "JAEGER_OTLP_HTTP_PORT"} {
		j.process.Env = append(j.process.Env, fmt.Sprintf("%s=%d", name, ports[i]))
	}
	j.process.Stdout, j.process.Stderr = j.log, j.log
	if err := j.process.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = j.process.Wait()
		close(j.ended)
	}()
	// The other end of its standard input is ours alone (exec.Cmd keeps it open):
	// it reads the end when this process is gone, however it went.
	j.watchdog = exec.Command("/bin/sh", "-c", `read -r _; kill -KILL "$1"`, "sh", strconv.Itoa(j.process.Process.Pid))
	if _, err = j.watchdog.StdinPipe(); err == nil {
		err = j.watchdog.Start()
	}
	if err != nil {
		j.watchdog = nil
		j.stop()
		return nil, err
	}
	if err := j.waitReady(ctx); err != nil {
		j.stop()
		return nil, err
	}
	return j, nil
}

// stop ends it. It is killed: when it is asked to end it takes eleven seconds,
// and it has nothing to save.
func (j *jaeger) stop() {
	if j.watchdog != nil { // first, since the pid may be another's afterwards
		_ = j.watchdog.Process.Kill()
		_ = j.watchdog.Wait()
	}
	_ = j.process.Process.Kill()
	<-j.ended
}

func (j *jaeger) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := get(ctx, j.query+"/api/services", &struct{}{})
		if err == nil {
			return nil
		}
		select {
		case <-j.ended:
			return fmt.Errorf("jaeger ended at its start:\n%s", j.log)
		case <-ctx.Done():
			return fmt.Errorf("jaeger is not ready: %w\n%s", err, j.log)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// freePorts finds ports below those that systems hand out to outgoing
// connections (from 32768 on Linux).
func freePorts(n int) ([]int, error) {
	var ports []int
	for range 100 {
		port := 20000 + rand.IntN(12768)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		defer l.Close() // not before all are found, so that they differ
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, errors.New("no free ports")
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	const most = 16 << 10
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-most):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.text))
}

// get reads an answer of the query API.
func get(ctx context.Context, url string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, resp.Status, bytes.TrimSpace(body))
	}
	return json.Unmarshal(body, into)
}
