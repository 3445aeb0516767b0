//go:build linux

package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"strings"
	"time"
)

// Engine is the Docker engine's HTTP API without any client library, so that the bare figure holds nothing of ours.
type Engine struct {
	http   *http.Client
	socket string
}

// NewEngine takes the engine of DOCKER_HOST (unix:// only) or the usual socket.
func NewEngine() (*Engine, error) {
	socket := "/var/run/docker.sock"
	if host := os.Getenv("DOCKER_HOST"); host != "" {
		path, ok := strings.CutPrefix(host, "unix://")
		if !ok {
			return nil, fmt.Errorf("DOCKER_HOST is %s: the bench needs an engine on this machine (unix://PATH)", host)
		}
		socket = path
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Engine{http: &http.Client{Transport: &http.Transport{DialContext: dial}}, socket: socket}, nil
}

// Close drops idle connections.
func (e *Engine) Close() { e.http.CloseIdleConnections() }

type engineError struct {
	status  int
	message string
}

func (e *engineError) Error() string { return fmt.Sprintf("engine: %s (%d)", e.message, e.status) }

func (e *Engine) call(ctx context.Context, method, path string, body, answer any) error {
	var sent io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		sent = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, sent)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := e.http.Do(req)
	if err != nil {
		return fmt.Errorf("no Docker engine answers at %s (deploy/scripts/engine.sh starts one): %w", e.socket, err)
	}
	defer func() { _ = resp.Body.Close() }()
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		var m struct{ Message string }
		if json.Unmarshal(content, &m) != nil {
			m.Message = string(content)
		}
		return fmt.Errorf("%s %s: %w", method, path, &engineError{resp.StatusCode, m.Message})
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(content, answer)
}

// Version returns the engine's version.
func (e *Engine) Version(ctx context.Context) (string, error) {
	var v struct{ Version string }
	err := e.call(ctx, http.MethodGet, "/version", nil, &v)
	return v.Version, err
}

// HasImage fails with what to do where the image is not in the engine.
func (e *Engine) HasImage(ctx context.Context, image string) error {
	err := e.call(ctx, http.MethodGet, "/images/"+image+"/json", nil, nil)
	if missing(err) {
		return fmt.Errorf("image %s is not in the engine: run `make images`", image)
	}
	return err
}

func missing(err error) bool {
	var e *engineError
	return errors.As(err, &e) && e.status == http.StatusNotFound
}

// CreateStart makes and starts a container on the engine's default network (a network namespace of its own) that only
// sleeps, and returns its id and how long both calls took together.
func (e *Engine) CreateStart(ctx context.Context, name, image string) (string, time.Duration, error) {
	spec := map[string]any{"Image": image, "Entrypoint": []string{"sleep"}, "Cmd": []string{"infinity"}}
	var created struct{ ID string }
	began := time.Now()
	if err := e.call(ctx, http.MethodPost, "/containers/create?name="+url.QueryEscape(name), spec, &created); err != nil {
		return "", 0, err
	}
	if err := e.call(ctx, http.MethodPost, "/containers/"+created.ID+"/start", nil, nil); err != nil {
		return created.ID, 0, err
	}
	return created.ID, time.Since(began), nil
}

// LiftCPULimit lets a container use all cores, as the direct sshd does that it is compared with: a workspace's share of a
// small host is a fraction of a core, and its limit would be what is measured.
func (e *Engine) LiftCPULimit(ctx context.Context, id string) error {
	limit := map[string]int64{"NanoCpus": int64(runtime.NumCPU()) * 1e9}
	return e.call(ctx, http.MethodPost, "/containers/"+id+"/update", limit, nil)
}

// Remove ends a container and removes it; one that is not there is fine.
func (e *Engine) Remove(ctx context.Context, id string) error {
	err := e.call(ctx, http.MethodDelete, "/containers/"+id+"?force=true", nil, nil)
	if missing(err) {
		return nil
	}
	return err
}

// Container is one of the engine's containers.
type Container struct {
	ID, Name string
	PID      int // of its first process, in the host's numbers; 0 where it does not run
}

// Containers returns the containers whose names begin with prefix, also those that do not run.
func (e *Engine) Containers(ctx context.Context, prefix string) ([]Container, error) {
	all, err := e.list(ctx, "")
	if err != nil {
		return nil, err
	}
	var found []Container
	for _, c := range all {
		if !strings.HasPrefix(c.Name, prefix) {
			continue
		}
		var detail struct{ State struct{ Pid int } }
		if err := e.call(ctx, http.MethodGet, "/containers/"+c.ID+"/json", nil, &detail); missing(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		c.PID = detail.State.Pid
		found = append(found, c)
	}
	return found, nil
}

// Using returns the containers that have a volume, without their process ids.
func (e *Engine) Using(ctx context.Context, volume string) ([]Container, error) {
	filter, err := json.Marshal(map[string][]string{"volume": {volume}})
	if err != nil {
		return nil, err
	}
	return e.list(ctx, "&filters="+url.QueryEscape(string(filter)))
}

func (e *Engine) list(ctx context.Context, query string) ([]Container, error) {
	var list []struct {
		ID    string
		Names []string
	}
	if err := e.call(ctx, http.MethodGet, "/containers/json?all=true"+query, nil, &list); err != nil {
		return nil, err
	}
	var found []Container
	for _, c := range list {
		if len(c.Names) > 0 {
			found = append(found, Container{ID: c.ID, Name: strings.TrimPrefix(c.Names[0], "/")})
		}
	}
	return found, nil
}

// VolumesUnder returns the names of the engine's volumes whose files lie below dir.
func (e *Engine) VolumesUnder(ctx context.Context, dir string) ([]string, error) {
	var list struct {
		Volumes []struct {
			Name    string
			Options map[string]string
		}
	}
	if err := e.call(ctx, http.MethodGet, "/volumes", nil, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, v := range list.Volumes {
		if strings.HasPrefix(v.Options["device"], dir+"/") {
			names = append(names, v.Name)
		}
	}
	return names, nil
}

// RemoveVolume removes a volume by name; one that is not there is fine.
func (e *Engine) RemoveVolume(ctx context.Context, name string) error {
	err := e.call(ctx, http.MethodDelete, "/volumes/"+url.PathEscape(name), nil, nil)
	if missing(err) {
		return nil
	}
	return err
}
