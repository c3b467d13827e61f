package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestRender(t *testing.T) {
	zone := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = zone })
	var traces []*traceData
	if err := json.Unmarshal([]byte(twoTraces), &traces); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	render(&out, traces)
	if got := out.String(); got != rendered {
		t.Errorf("got\n%s\nwant\n%s", got, rendered)
	}
}

// Two traces as /api/traces shows them: a wait behind two holders, one of which
// is in the other trace, and a refusal.
const twoTraces = `[
{"traceID": "11112222333344445555666677778888", "processes": {"p1": {"serviceName": "worker", "tags": [{"key": "service.instance.id", "value": "worker-0"}]}}, "spans": [
	{"spanID": "a1", "operationName": "job pay", "references": [], "startTime": 1000000, "duration": 2000000, "processID": "p1", "tags": [], "logs": []},
	{"spanID": "a2", "operationName": "pg_advisory_lock_shared", "references": [{"refType": "CHILD_OF", "spanID": "a1"}, {"refType": "FOLLOWS_FROM", "traceID": "9999", "spanID": "b2"},
		{"refType": "FOLLOWS_FROM", "traceID": "9999", "spanID": "zz"}],
		"startTime": 1000000, "duration": 1500000, "processID": "p1", "tags": [
		{"key": "pgadvlock.outcome", "value": "acquired"}, {"key": "pgadvlock.key", "value": "42"}, {"key": "pgadvlock.lock_mode", "value": "share"},
		{"key": "pgadvlock.scope", "value": "session"}, {"key": "pgadvlock.reentrant", "value": true}], "logs": [
		{"timestamp": 1500000, "fields": [{"key": "event", "value": "advisory lock blocked"}, {"key": "pgadvlock.holder.pid", "value": "[7,8]"},
			{"key": "pgadvlock.holder.application_name", "value": "[\"worker-1\",\"psql\"]"}, {"key": "pgadvlock.holder.client_address", "value": "[\"10.0.0.1\",\"\"]"},
			{"key": "pgadvlock.holder.state", "value": "[\"idle\",\"\"]"}, {"key": "pgadvlock.holder.since", "value": "[\"1970-01-01T00:00:01Z\",\"\"]"},
			{"key": "pgadvlock.holder.lock_mode", "value": "[\"exclusive\",\"share\"]"}]}]},
	{"spanID": "a3", "operationName": "advisory lock held", "references": [{"refType": "CHILD_OF", "spanID": "a1"}, {"refType": "FOLLOWS_FROM", "traceID": "11112222333344445555666677778888", "spanID": "a2"}],
		"startTime": 2500000, "duration": 250, "processID": "p1", "tags": [
		{"key": "pgadvlock.end", "value": "unlocked"}, {"key": "pgadvlock.key", "value": "42"}, {"key": "pgadvlock.lock_mode", "value": "share"}, {"key": "pgadvlock.scope", "value": "session"},
		{"key": "code.file.path", "value": "/src/pay.go"}, {"key": "code.line.number", "value": 17}], "logs": [
		{"timestamp": 2500100, "fields": [{"key": "event", "value": "advisory lock wanted"}, {"key": "pgadvlock.waiter.pid", "value": 9}]}]}]},
{"traceID": "99990000333344445555666677778888", "processes": {"p1": {"serviceName": "worker", "tags": [{"key": "service.instance.id", "value": "worker-1"}]}}, "spans": [
	{"spanID": "b1", "operationName": "job invoice", "references": [], "startTime": 1250000, "duration": 2000, "processID": "p1", "tags": [{"key": "otel.status_description", "value": "no\nway"}], "logs": [
		{"timestamp": 1251000, "fields": [{"key": "event", "value": "pgadvlock pooled-session-lock"}, {"key": "pgadvlock.key", "value": "8"},
			{"key": "code.file.path", "value": "/src/invoice.go"}, {"key": "code.line.number", "value": 3}]}]},
	{"spanID": "b2", "operationName": "pg_advisory_lock", "references": [{"refType": "CHILD_OF", "spanID": "b1"}], "startTime": 1251990, "duration": 10, "processID": "p1", "tags": [
		{"key": "pgadvlock.outcome", "value": "refused"}, {"key": "pgadvlock.rule", "value": "pooled-session-lock"}], "logs": []}]}]`

const rendered = `worker-0  00:00:01.000  11112222333344445555666677778888
  job pay                    ████████████████████████████        2s
    pg_advisory_lock_shared  █████████████████████·······      1.5s  acquired, share session lock 42, reentrant
        at 500ms: advisory lock blocked: pid 7 (worker-1 at 10.0.0.1) has it, exclusive, idle for 500ms; pid 8 (psql) has it, share
        link to pg_advisory_lock of worker-1, trace 9999
        link to span zz of trace 9999
    advisory lock held       ·····················█······     250µs  unlocked, share session lock 42, taken at pay.go:17
        at 100µs: advisory lock wanted by pid 9
        link to pg_advisory_lock_shared

worker-1  00:00:01.250  99990000333344445555666677778888
  job invoice         ████████████████████████████       2ms  failed: no way
      at 1ms: pgadvlock pooled-session-lock, lock 8, at invoice.go:3
    pg_advisory_lock  ···························█      10µs  refused, pooled-session-lock

`
