package docker_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/docker/docker/api/types/image"
	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/carrel-dev/carrel/agent/host"
)

// images is a registry with a door in front that a test can disturb.
type images struct {
	t     *testing.T
	host  string // of the door
	real  string
	fault atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool]
	blobs atomic.Int64 // blob downloads
}

func newImages(t *testing.T) *images {
	t.Helper()
	back := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(back.Close)
	target, err := url.Parse(back.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := &images{t: t, real: target.Host}
	proxy := httputil.NewSingleHostReverseProxy(target)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			r.blobs.Add(1)
		}
		if f := r.fault.Load(); f != nil && (*f)(w, req) {
			return
		}
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(front.Close)
	r.host = strings.TrimPrefix(front.URL, "http://")
	return r
}

// push makes an image of random layers and returns its digest. What the engine has of it goes with the test.
func (r *images) push(ref string, layers, size int) string {
	r.t.Helper()
	type descriptor struct {
		MediaType string `json:"mediaType"`
		Size      int    `json:"size"`
		Digest    string `json:"digest"`
	}
	repository, tag, _ := strings.Cut(ref, ":")
	var list []descriptor
	var diffs []string
	for range layers {
		content := make([]byte, size)
		rand.Read(content)
		packed, diff := layerOf(r.t, content)
		list = append(list, descriptor{"application/vnd.docker.image.rootfs.diff.tar.gzip", len(packed), r.blob(repository, packed)})
		diffs = append(diffs, diff)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	const manifestType = "application/vnd.docker.distribution.manifest.v2+json"
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "layers": list,
		"config": descriptor{"application/vnd.docker.container.image.v1+json", len(config), r.blob(repository, config)},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(http.MethodPut, "/v2/"+repository+"/manifests/"+tag, manifestType, manifest)
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(manifest))
	pulled := r.host + "/" + repository + "@" + digest
	api := raw(r.t)
	r.t.Cleanup(func() {
		_, _ = api.ImageRemove(context.Background(), pulled, image.RemoveOptions{Force: true})
	})
	return digest
}

func (r *images) blob(repository string, content []byte) string {
	r.t.Helper()
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(content))
	r.send(http.MethodPost, "/v2/"+repository+"/blobs/uploads/?digest="+digest, "application/octet-stream", content)
	return digest
}

func (r *images) send(method, path, kind string, content []byte) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://"+r.real+path, bytes.NewReader(content))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusCreated {
		text, _ := io.ReadAll(answer.Body)
		r.t.Fatalf("%s %s: %s: %s", method, path, answer.Status, text)
	}
}

func (r *images) disturb(f func(w http.ResponseWriter, req *http.Request) bool) { r.fault.Store(&f) }

func none(host.PullProgress) {}

// CONT-06: by digest, whatever the tag says; the registry is asked for what a tag stands for.
func TestCONT06RealRegistry(t *testing.T) {
	r, c := newImages(t), open(t, nil)
	first := r.push("team/img:1", 1, 4<<10)
	second := r.push("team/img:1", 1, 4<<10)
	if got, err := c.Resolve(t.Context(), r.host+"/team/img:1"); err != nil || got != second {
		t.Errorf("resolve: %s, %v; want %s", got, err, second)
	}
	ref := r.host + "/team/img@" + first
	if err := c.Pull(t.Context(), ref, none); err != nil {
		t.Fatal(err)
	}
	got, err := c.Image(t.Context(), ref)
	if err != nil || len(got.Digests) != 1 || !strings.HasSuffix(got.Digests[0], first) {
		t.Errorf("image: %+v, %v", got, err)
	}
	if _, err := c.Resolve(t.Context(), r.host+"/team/none:1"); host.KindOf(err) != host.KindNotFound {
		t.Errorf("resolve of nothing: %v", err)
	}
}

// CONT-03: failures behind the 200 of a pull.
func TestCONT03RealRegistry(t *testing.T) {
	for caseName, c := range map[string]struct {
		fault func(w http.ResponseWriter, r *http.Request) bool
		kind  host.Kind
	}{
		"a layer is missing": {func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/blobs/") {
				http.Error(w, `{"errors":[{"code":"BLOB_UNKNOWN","message":"blob unknown to registry"}]}`, http.StatusNotFound)
				return true
			}
			return false
		}, ""},
		"not allowed": {func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				http.Error(w, `{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"}]}`, http.StatusForbidden)
				return true
			}
			return false
		}, host.KindDenied},
		"no such manifest": {func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusNotFound)
				fmt.Fprint(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
				return true
			}
			return false
		}, host.KindNotFound},
	} {
		t.Run(caseName, func(t *testing.T) {
			r, client := newImages(t), open(t, nil)
			ref := r.host + "/team/img@" + r.push("team/img:1", 2, 64<<10)
			r.disturb(c.fault)
			err := client.Pull(t.Context(), ref, none)
			if err == nil || c.kind != "" && host.KindOf(err) != c.kind || host.KindOf(err) == host.KindUnavailable {
				t.Fatalf("pull: %v of kind %s", err, host.KindOf(err))
			}
			if _, err := client.Image(t.Context(), ref); host.KindOf(err) != host.KindNotFound {
				t.Errorf("the engine has it: %v", err)
			}
			r.fault.Store(nil)
			if err := client.Pull(t.Context(), ref, none); err != nil {
				t.Errorf("again: %v", err)
			}
		})
	}
}

// CONT-04: a layer that stops half way is not waited for once the caller has had enough, and progress is told till then.
func TestCONT04RealRegistry(t *testing.T) {
	r, c := newImages(t), open(t, nil)
	ref := r.host + "/team/img@" + r.push("team/img:1", 1, 4<<20)
	released := make(chan struct{})
	t.Cleanup(func() { close(released) })
	r.disturb(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, "/blobs/") {
			return false
		}
		answer, err := http.Get("http://" + r.real + req.URL.Path)
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		if answer.ContentLength < 1<<20 {
			w.Header().Set("Content-Length", fmt.Sprint(answer.ContentLength))
			io.Copy(w, answer.Body)
			return true
		}
		w.Header().Set("Content-Length", fmt.Sprint(answer.ContentLength))
		io.CopyN(w, answer.Body, 1<<20)
		http.NewResponseController(w).Flush()
		select {
		case <-released:
		case <-req.Context().Done():
		}
		return true
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var most int64
	err := c.Pull(ctx, ref, func(p host.PullProgress) {
		if most = max(most, p.Done); p.Done > 0 && p.Total > 1<<20 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || most == 0 {
		t.Errorf("pull: %v after %d bytes", err, most)
	}
}

// A registry that is away fails the pull with its address.
func TestRegistryAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	err = open(t, nil).Pull(ctx, address+"/x@sha256:"+strings.Repeat("0", 64), none)
	if err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("pull: %v", err)
	}
}
