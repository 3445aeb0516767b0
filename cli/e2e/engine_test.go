package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// engine is the container engine as somebody sees it who goes behind Carrel's back.
type engine struct {
	t      *testing.T
	client *http.Client
}

func newEngine(t *testing.T) engine {
	t.Helper()
	return engine{t, &http.Client{Timeout: commandLimit, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", "/var/run/docker.sock")
		},
	}}}
}

// call sends a request, reads the answer into out, and returns the status.
func (e engine) call(method, path string, out any) int {
	e.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://engine/v1.41"+path, http.NoBody) // also after the test's own context
	if err != nil {
		e.t.Fatal(err)
	}
	res, err := e.client.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if out != nil && res.StatusCode < 300 {
		if err := json.NewDecoder(res.Body).Decode(out); err != nil {
			e.t.Fatalf("%s %s: %v", method, path, err)
		}
	}
	return res.StatusCode
}

// must is call where the engine must agree.
func (e engine) must(method, path string, out any) {
	e.t.Helper()
	if status := e.call(method, path, out); status >= 300 {
		e.t.Fatalf("engine: %s %s: status %d", method, path, status)
	}
}

// container is what the engine says of a run's container.
type container struct {
	ID    string
	State struct {
		Status     string
		Running    bool
		StartedAt  time.Time
		FinishedAt time.Time
		ExitCode   int
	}
	Config struct{ Labels map[string]string }
}

func containerName(w shown) string { return fmt.Sprintf("carrel-%s-%d", w.ID, w.Run.Epoch) }

// inspect returns the container of a workspace's run; there must be one.
func (e engine) inspect(name string) container {
	e.t.Helper()
	var c container
	e.must(http.MethodGet, "/containers/"+name+"/json", &c)
	return c
}

// exists reports whether the engine has a container of this name.
func (e engine) exists(name string) bool {
	e.t.Helper()
	return e.call(http.MethodGet, "/containers/"+name+"/json", nil) == http.StatusOK
}

// forget removes the volumes that the engine knows under a directory; the files are the lab's.
func (e engine) forget(dir string) {
	e.t.Helper()
	var list struct {
		Volumes []struct {
			Name    string
			Options map[string]string
		}
	}
	e.must(http.MethodGet, "/volumes", &list)
	for _, v := range list.Volumes {
		if strings.HasPrefix(v.Options["device"], dir+string(filepath.Separator)) {
			e.must(http.MethodDelete, "/volumes/"+v.Name, nil)
		}
	}
}

// homeFile is where a file of a workspace's home lies on the host.
func (l *lab) homeFile(w shown, name string) string {
	l.t.Helper()
	for _, m := range w.Mounts {
		if m.Home {
			return filepath.Join(l.state, "agent", "volumes", m.VolumeID, name)
		}
	}
	l.t.Fatalf("%s has no home: %+v", w.ID, w.Mounts)
	return ""
}

// readFile reads a file that a workspace writes; a file that is not there yet is empty.
func readFile(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}
