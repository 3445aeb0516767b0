//go:build linux

package rig

import (
	"context"
	"os"
	"testing"
	"time"
)

func TestParseRollup(t *testing.T) {
	const text = "5592aa-7ffd ---p 00000000 00:00 0    [rollup]\nRss:                5120 kB\nPss:                1300 kB\nPss_Dirty:           900 kB\n"
	rss, pss, err := parseRollup([]byte(text))
	if err != nil || rss != 5120 || pss != 1300 {
		t.Errorf("got %v, %v, %v", rss, pss, err)
	}
	if _, _, err := parseRollup([]byte("Rss: 1 kB\n")); err == nil {
		t.Error("a rollup without Pss was taken")
	}
}

func TestParseStatTakesAnyCommandName(t *testing.T) {
	const text = "42 (a) b (c)) S 7 42 42 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 9 0 100 1 2\n"
	s, err := parseStat(text)
	if err != nil || s.parent != 7 || s.threads != 9 || s.cpu != 3*time.Second {
		t.Errorf("got %+v, %v", s, err)
	}
	for _, bad := range []string{"", "42 (x", "42 (x) S 7"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("stat %q was taken", bad)
		}
	}
}

func TestMeasureThisProcess(t *testing.T) {
	c, err := Measure(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if c.RSSKiB < 500 || c.PSSKiB <= 0 || c.Descriptors < 3 || c.Threads < 1 {
		t.Errorf("implausible: %+v", c)
	}
	if _, err := Measure(1 << 30); err == nil {
		t.Error("a process that does not exist has a cost")
	}
}

func TestTreeHoldsChildren(t *testing.T) {
	s, err := Open(context.Background(), []string{"cat"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abort()
	all, err := Tree(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, pid := range all {
		found = found || pid == s.PID()
	}
	if !found {
		t.Errorf("%v does not hold the child %d", all, s.PID())
	}
}

// The kernel counts what a child used also when it has ended and was nobody's any more.
func TestMeterCountsWhatWasStarted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("control groups need root; `make test` runs as root")
	}
	m, err := NewMeter()
	if err != nil {
		t.Fatal(err)
	}
	before, err := m.Used()
	if err != nil {
		t.Fatal(err)
	}
	const burn = `sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done' & wait`
	if _, _, err := (Run{}).Do(context.Background(), []string{"sh", "-c", burn}); err != nil {
		t.Fatal(err)
	}
	after, err := m.Used()
	if err != nil {
		t.Fatal(err)
	}
	if used := after - before; used < 20*time.Millisecond {
		t.Errorf("a busy loop used %v", used)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(m.dir); err == nil {
		t.Errorf("%s was left behind", m.dir)
	}
}
