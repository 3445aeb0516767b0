package initlink_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const engineSocket = "/var/run/docker.sock"

// proxyEnv makes the test binary an ssh ProxyCommand to the unix socket that it names.
const proxyEnv = "CARREL_TEST_PROXY"

// fdpassEnv makes it hand the connection over instead of carrying bytes.
const fdpassEnv = "CARREL_TEST_FDPASS"

// binDir holds the carrel-init that containers get.
var binDir string

func TestMain(m *testing.M) {
	if path := os.Getenv(proxyEnv); path != "" {
		os.Exit(proxy(path))
	}
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "initd-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "carrel-init"), "github.com/carrel-dev/carrel/agent/cmd/carrel-init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build carrel-init: %v\n%s", err, out)
		return 1
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binDir = dir
	return m.Run()
}

func proxy(path string) int {
	conn, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		return 1
	}
	if os.Getenv(fdpassEnv) != "" {
		return passTo(1, conn.(*net.UnixConn))
	}
	go func() {
		_, _ = io.Copy(conn, os.Stdin)
		_ = conn.(*net.UnixConn).CloseWrite()
	}()
	_, _ = io.Copy(os.Stdout, conn)
	return 0
}

// passTo sends conn over the unix socket fd, as ssh's ProxyUseFdpass wants it.
func passTo(fd int, conn *net.UnixConn) int {
	f, err := conn.File()
	if err != nil {
		return 1
	}
	defer f.Close()
	if err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(int(f.Fd())), nil, 0); err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		return 1
	}
	return 0
}

// engine is as much of the Docker API as these tests need.
type engine struct {
	t      testing.TB
	client *http.Client
}

func newEngine(t testing.TB) *engine {
	t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", engineSocket)
	}
	return &engine{t: t, client: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// call fails the test unless the answer is a success, or 304.
func (e *engine) call(method, path string, body, answer any) {
	e.t.Helper()
	if err := e.try(method, path, body, answer); err != nil {
		e.t.Fatal(err)
	}
}

func (e *engine) try(method, path string, body, answer any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(method, "http://engine/v1.41"+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := e.client.Do(req)
	if err != nil {
		return fmt.Errorf("docker engine: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		return fmt.Errorf("%s %s: %s %s", method, path, resp.Status, text)
	}
	if answer != nil {
		return json.Unmarshal(text, answer)
	}
	return nil
}

type inspection struct {
	State struct {
		Pid      int
		Running  bool
		ExitCode int
	}
}

func (e *engine) inspect(id string) inspection {
	e.t.Helper()
	var got inspection
	e.call("GET", "/containers/"+id+"/json", nil, &got)
	return got
}

// logs gives what the first process wrote, without the engine's frame headers.
func (e *engine) logs(id string) string {
	resp, err := e.client.Get("http://engine/v1.41/containers/" + id + "/logs?stdout=1&stderr=1&tail=60")
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	var out strings.Builder
	for len(data) >= 8 {
		n := min(int(binary.BigEndian.Uint32(data[4:8])), len(data)-8)
		out.Write(data[8 : 8+n])
		data = data[8+n:]
	}
	return out.String()
}

// sudoCaps are the capabilities of a workspace's container, design D6.
func sudoCaps() []string {
	return []string{"SETUID", "SETGID", "SETPCAP", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SYS_CHROOT", "AUDIT_WRITE"}
}

func (e *engine) start(name, image string, binds, env []string, noNewPrivileges bool) (id string, pid int) {
	e.t.Helper()
	host := map[string]any{
		"Binds": binds, "CapDrop": []string{"ALL"}, "CapAdd": sudoCaps(), "NetworkMode": "none", "PidsLimit": 4096,
	}
	if noNewPrivileges {
		host["SecurityOpt"] = []string{"no-new-privileges"}
	}
	var made struct{ ID string }
	e.call("POST", "/containers/create?name="+name, map[string]any{
		"Image": image, "User": "0:0", "Env": env, "WorkingDir": "/",
		"Entrypoint": []string{"/run/carrel-bin/carrel-init"}, "Cmd": []string{"init", "--link", "unix:/run/carrel-agent/link.sock"},
		"HostConfig": host,
	}, &made)
	e.t.Cleanup(func() {
		if e.t.Failed() {
			e.t.Logf("container log:\n%s", e.logs(made.ID))
		}
		if err := e.try("DELETE", "/containers/"+made.ID+"?force=1&v=1", nil, nil); err != nil {
			e.t.Error(err)
		}
	})
	e.call("POST", "/containers/"+made.ID+"/start", nil, nil)
	return made.ID, e.inspect(made.ID).State.Pid
}

func eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) { //nolint:forbidigo // a poll with a deadline
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}
