package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/agent"
)

func TestOneAgentHasADataDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "agent")
	first, err := agent.Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Lock(dir); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d;", os.Getpid())) {
		t.Errorf("a second lock: %v; want the holder's pid", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := agent.Lock(dir)
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}
