package main

import (
	"strings"
	"testing"
)

func run(t *testing.T, events string) (*report, string) {
	t.Helper()
	var out strings.Builder
	r := &report{out: &out, output: map[string][]string{}}
	if err := r.read(strings.NewReader(events)); err != nil {
		t.Fatal(err)
	}
	r.close()
	return r, out.String()
}

func TestPassedPackageIsItsClosingLine(t *testing.T) {
	r, out := run(t, `{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0.5}
{"Action":"output","Package":"p","Output":"ok  \tp\t0.6s\n"}
{"Action":"pass","Package":"p","Elapsed":0.6}
`)
	if strings.Contains(out, "chatter") || !strings.Contains(out, "ok  \tp\t0.6s\n") || !strings.Contains(out, "go: 1 passed, 0 failed, 0 skipped") {
		t.Errorf("got:\n%s", out)
	}
	if r.broken {
		t.Error("a passed run counts as broken")
	}
}

func TestFailedTestShowsItsOutput(t *testing.T) {
	r, out := run(t, `{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:3: wrong\n"}
{"Action":"fail","Package":"p","Test":"TestA","Elapsed":0.5}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.6s\n"}
{"Action":"fail","Package":"p","Elapsed":0.6}
`)
	if !strings.Contains(out, "--- FAIL: p TestA") || !strings.Contains(out, "a_test.go:3: wrong") {
		t.Errorf("got:\n%s", out)
	}
	if !r.broken || r.failed != 1 {
		t.Errorf("broken %v, failed %d; want true, 1", r.broken, r.failed)
	}
}

func TestPanicCountsTheTestThatNeverEnded(t *testing.T) {
	r, out := run(t, `{"Action":"output","Package":"p","Test":"TestA","Output":"panic: boom\n"}
{"Action":"fail","Package":"p","Elapsed":0.6}
`)
	if r.failed != 1 || !strings.Contains(out, "panic: boom") {
		t.Errorf("failed %d; got:\n%s", r.failed, out)
	}
}

func TestBuildFailureBreaksTheRunAndIsShown(t *testing.T) {
	r, out := run(t, `{"ImportPath":"p","Action":"build-output","Output":"p/a.go:1:1: expected package\n"}
{"ImportPath":"p","Action":"build-fail"}
`)
	if !r.broken || !strings.Contains(out, "expected package") {
		t.Errorf("broken %v; got:\n%s", r.broken, out)
	}
}

func TestSkipTellsItsReason(t *testing.T) {
	_, out := run(t, `{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:3: no engine\n"}
{"Action":"skip","Package":"p","Test":"TestA"}
`)
	if !strings.Contains(out, "skipped: p TestA: a_test.go:3: no engine") || !strings.Contains(out, "0 passed, 0 failed, 1 skipped") {
		t.Errorf("got:\n%s", out)
	}
}
