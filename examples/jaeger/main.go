// Command jaeger runs three pods of a worker whose jobs lock, wait, leak and
// deadlock, and shows their traces.
//
// With DATABASE_URL set it runs the pods on that database and sends their spans
// where the standard OTEL_ variables say; POOLED_DATABASE_URL is the same database
// through a pooler in transaction mode, if there is one, and POD_NAME makes it one
// pod of the three.
// Without, as make jaeger runs it, it starts a PostgreSQL and a Jaeger of its
// own and prints what that Jaeger has got.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "jaeger:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	to := database{os.Getenv("DATABASE_URL"), os.Getenv("POOLED_DATABASE_URL")}
	if to.dsn == "" {
		return showcase(ctx)
	}
	names := podNames
	if name := os.Getenv("POD_NAME"); name != "" {
		names = []string{name}
	}
	return runPods(ctx, to, names...)
}

// service is what the pods call themselves, unless OTEL_SERVICE_NAME does.
const service = "worker"

// showcase runs the pods on servers of its own, and prints their traces.
func showcase(ctx context.Context) error {
	j, err := startJaeger(ctx)
	if errors.Is(err, errNoJaeger) {
		return errors.New("DATABASE_URL is not set, and there is no Jaeger to start: run make jaeger, or see README.md")
	}
	if err != nil {
		return err
	}
	defer j.stop()
	server, err := pgtest.Start()
	if err != nil {
		return err
	}
	defer server.Close()
	for name, value := range j.exporterVariables("http/protobuf", service) {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}

	fmt.Println("Three pods do their jobs; this takes some ten seconds. What the driver has to say meanwhile:")
	fmt.Println()
	to := databaseOn(server, "postgres")
	if err := runPods(ctx, to, podNames...); err != nil {
		return err
	}
	traces, err := j.await(ctx, search(service), complete(to))
	if err != nil {
		return err
	}
	fmt.Println("\nWhat Jaeger has got, by job:")
	fmt.Println()
	render(os.Stdout, traces)

	fmt.Println("Questions, as Jaeger's API takes them:")
	fmt.Println()
	for _, q := range []struct{ question, tag string }{
		{"who timed out?", "pgadvlock.outcome=timeout"},
		{"what was refused?", "pgadvlock.outcome=refused"},
		{"who was in a deadlock?", "pgadvlock.outcome=deadlock"},
		{"where do we leak?", "pgadvlock.end=leaked"},
		{"who wants customer 9527?", "pgadvlock.key=(1, 9527)"},
	} {
		found, err := j.find(ctx, search(service, q.tag))
		if err != nil {
			return err
		}
		var jobs []string
		for _, t := range found {
			jobs = append(jobs, t.instance(t.root())+" "+strings.TrimPrefix(t.root().OperationName, "job "))
		}
		fmt.Printf("  %-25s %-28s %s\n", q.question, q.tag, strings.Join(jobs, ", "))
		fmt.Printf("  %s/api/traces?%s\n", j.query, search(service, q.tag))
	}
	fmt.Printf("\nJaeger: %s\n", j.query)
	if os.Getenv("JAEGER_UI_DIR") == "" {
		fmt.Println("(Built by go build, it has its API and no pages. JAEGER_UI_DIR names a directory with them; the compose file has a Jaeger with pages.)")
	}
	if !term.IsTerminal(int(os.Stdin.Fd())) || !term.IsTerminal(int(os.Stdout.Fd())) {
		return nil
	}
	fmt.Println("Ctrl-C ends it.")
	select {
	case <-ctx.Done():
		return nil
	case <-j.ended:
		return fmt.Errorf("jaeger has ended:\n%s", j.log)
	}
}

// exporterVariables point a program at this Jaeger, by "http/protobuf" or "grpc".
func (j *jaeger) exporterVariables(protocol, service string) map[string]string {
	endpoint := j.otlpHTTP
	if protocol == "grpc" {
		endpoint = j.otlpGRPC
	}
	return map[string]string{
		"OTEL_TRACES_EXPORTER":        "otlp",
		"OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
		"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
		"OTEL_SERVICE_NAME":           service,
	}
}

// databaseOn is a database of a server, and its way through PgBouncer if that
// is there.
func databaseOn(server *pgtest.Server, name string) database {
	to := database{dsn: server.DSN(name)}
	if server.HasBouncer() {
		to.pooled = server.BouncerDSN(name, "transaction")
	}
	return to
}

// complete says of traces whether they are all that the pods have sent: one for
// each job, with its root.
func complete(to database) func([]*traceData) bool {
	want := []string{"job import", "job invoice", "job nightly-report", "job nightly-report", "job nightly-report",
		"job pay", "job pay", "job rebuild", "job refund", "job refund"}
	if to.pooled != "" {
		want = append(want, "job sync")
	}
	want = append(want, "job transfer", "job transfer")
	return func(traces []*traceData) bool {
		var roots []string
		for _, t := range traces {
			for _, s := range t.Spans {
				if s.parent() == "" {
					roots = append(roots, s.OperationName)
				}
			}
		}
		slices.Sort(roots)
		return slices.Equal(roots, want)
	}
}
