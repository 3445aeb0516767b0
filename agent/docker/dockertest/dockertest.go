// Package dockertest runs a Docker engine of a test's own beside the system's, with a stand-in for NVIDIA's hook.
package dockertest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"
)

// hook stands in for nvidia-container-runtime-hook: it writes down which devices each container that asks for any is to
// see; where the environment names them twice (20.10 adds to it) and alike, once.
const hook = `#!/bin/sh
bundle=$(sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')
sed 's/"/\n/g' "$bundle/config.json" | grep '^NVIDIA_VISIBLE_DEVICES=' | uniq >> SEEN
`

// limits of a test: how long the engine may take to answer after its start, and to end.
const (
	startLimit = time.Minute
	endLimit   = 30 * time.Second
)

// Engine is a dockerd in a network namespace of its own: it needs root and leaves the system's engine alone. It ends with the test.
type Engine struct {
	// Host is the engine's address, "unix:///...".
	Host string
	// API is a client of it.
	API *client.Client

	t      testing.TB
	dir    string
	netns  string
	daemon *exec.Cmd
	done   chan struct{} // closed when the daemon has ended
}

// Start runs an engine with the given content of daemon.json, "{}" for none of it, and waits until it answers.
func Start(t testing.TB, config string) *Engine {
	t.Helper()
	dir, err := os.MkdirTemp("", "hosttest") // short: a unix socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{t: t, dir: dir, netns: "hosttest" + strings.ToLower(rand.Text()[:10]), Host: "unix://" + dir + "/s"}
	t.Cleanup(e.close)
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"bin/nvidia-container-runtime-hook": strings.ReplaceAll(hook, "SEEN", filepath.Join(dir, "seen")),
		"c.json":                            config,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if e.API, err = client.NewClientWithOpts(client.WithHost(e.Host), client.WithAPIVersionNegotiation()); err != nil {
		t.Fatal(err)
	}
	e.command("ip", "netns", "add", e.netns)
	e.command("ip", "-n", e.netns, "link", "set", "lo", "up")
	e.Begin()
	return e
}

func (e *Engine) command(args ...string) {
	e.t.Helper()
	if out, err := exec.CommandContext(context.Background(), args[0], args[1:]...).CombinedOutput(); err != nil {
		e.t.Fatalf("%v: %v\n%s", args, err, out)
	}
}

// Begin runs the daemon, anew after End, and waits until it answers.
func (e *Engine) Begin() {
	e.t.Helper()
	e.daemon = exec.CommandContext(context.Background(), "nsenter", "--net=/run/netns/"+e.netns, "dockerd", "--data-root", e.dir+"/data", "--exec-root", e.dir+"/exec",
		"-H", e.Host, "--pidfile", e.dir+"/pid", "--config-file", e.dir+"/c.json")
	e.daemon.Env = append(os.Environ(), "PATH="+e.dir+"/bin:"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	e.done = make(chan struct{})
	var output bytes.Buffer
	e.daemon.Stdout, e.daemon.Stderr = &output, &output
	if err := e.daemon.Start(); err != nil {
		e.t.Fatal(err)
	}
	daemon, done := e.daemon, e.done
	go func() {
		defer close(done)
		_ = daemon.Wait() // mostly a test's own signal
	}()
	deadline := time.Now().Add(startLimit)
	for {
		_, err := e.API.Ping(context.Background())
		if err == nil {
			return
		}
		select {
		case <-done:
			e.t.Fatalf("the engine ended: %s", output.String())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("the engine does not answer: %v", err)
		}
	}
}

// Signal sends the daemon a signal; nsenter has become it.
func (e *Engine) Signal(sig syscall.Signal) {
	e.t.Helper()
	if err := e.daemon.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		e.t.Error(err)
	}
}

// End ends the daemon by a signal and waits for its end.
func (e *Engine) End(sig syscall.Signal) {
	e.t.Helper()
	e.Signal(sig)
	select {
	case <-e.done:
	case <-time.After(endLimit):
		e.t.Error("the engine does not end")
	}
}

// EndContainerd ends the containerd that the engine started, where it outlived the engine: containers have shims of their own.
func (e *Engine) EndContainerd() {
	e.t.Helper()
	file := filepath.Join(e.dir, "exec/containerd/containerd.pid")
	content, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil {
		e.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil {
		e.t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		e.t.Error(err)
	}
	if err := os.Remove(file); err != nil {
		e.t.Error(err)
	}
}

// close leaves nothing: no container, process, mount, namespace or file.
func (e *Engine) close() {
	if e.daemon != nil && e.daemon.Process != nil {
		e.Signal(syscall.SIGCONT) // a test may have failed while it was stopped
		e.removeContainers()
		e.End(syscall.SIGTERM)
	}
	if e.API != nil {
		_ = e.API.Close()
	}
	e.unmount(filepath.Join(e.dir, "exec/netns/default"))
	e.unmount(filepath.Join(e.dir, "data")) // stays mounted on itself where the daemon was killed
	if out, err := exec.CommandContext(context.Background(), "ip", "netns", "del", e.netns).CombinedOutput(); err != nil {
		e.t.Logf("%s", out)
	}
	if err := os.RemoveAll(e.dir); err != nil {
		e.t.Log(err)
	}
}

// unmount takes away all that is mounted at a path.
func (e *Engine) unmount(path string) {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue
		}
		if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			e.t.Logf("unmount %s: %v", path, err)
		}
		return
	}
}

func (e *Engine) removeContainers() {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	list, err := e.API.ContainerList(ctx, container.ListOptions{All: true})
	for _, c := range list {
		err = errors.Join(err, e.API.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true}))
	}
	if err != nil {
		e.t.Log(err) // an engine that does not answer ends all the same
	}
}

// Load copies an image from another engine.
func (e *Engine) Load(from *client.Client, ref string) {
	e.t.Helper()
	ctx := context.Background()
	saved, err := from.ImageSave(ctx, []string{ref})
	if err != nil {
		e.t.Fatal(err)
	}
	defer func() { _ = saved.Close() }()
	answer, err := e.API.ImageLoad(ctx, saved)
	if err != nil {
		e.t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.API.ImageInspect(ctx, ref); err != nil {
		e.t.Fatal(err)
	}
}

// Derive makes an image of one that is there, with changes in Dockerfile words, "ENV A=b".
func (e *Engine) Derive(from, ref string, changes ...string) {
	e.t.Helper()
	ctx := context.Background()
	made, err := e.API.ContainerCreate(ctx, &container.Config{Image: from, Cmd: []string{"none"}}, nil, nil, nil, "")
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.API.ContainerCommit(ctx, made.ID, container.CommitOptions{Reference: ref, Changes: changes}); err != nil {
		e.t.Fatal(err)
	}
	if err := e.API.ContainerRemove(ctx, made.ID, container.RemoveOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

// Seen returns what the hook saw since Forget: a line `NVIDIA_VISIBLE_DEVICES=...` per container that asked for devices.
func (e *Engine) Seen() string {
	e.t.Helper()
	content, err := os.ReadFile(filepath.Join(e.dir, "seen"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		e.t.Fatal(err)
	}
	return string(content)
}

// Forget empties what the hook saw.
func (e *Engine) Forget() {
	e.t.Helper()
	if err := os.WriteFile(filepath.Join(e.dir, "seen"), nil, 0o600); err != nil {
		e.t.Fatal(err)
	}
}
