package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/docker/docker/api/types/image"

	"github.com/carrel-dev/carrel/agent/host"
)

// Image looks at an image that the engine has.
func (c *Client) Image(ctx context.Context, ref string) (host.Image, error) {
	ctx, cancel := c.call(ctx)
	defer cancel()
	got, err := c.api.ImageInspect(ctx, ref)
	if err != nil {
		return host.Image{}, failed("look for image "+ref, err)
	}
	out := host.Image{ID: got.ID, Digests: got.RepoDigests, Bytes: got.Size}
	if got.Config != nil {
		out.Labels, out.Env = got.Config.Labels, got.Config.Env
	}
	return out, nil
}

// Resolve asks a registry what a reference stands for.
func (c *Client) Resolve(ctx context.Context, ref string) (string, error) {
	ctx, cancel := c.slow(ctx)
	defer cancel()
	got, err := c.api.DistributionInspect(ctx, ref, "")
	if err != nil {
		return "", failed("ask the registry for "+ref, err)
	}
	return got.Descriptor.Digest.String(), nil
}

// message is one line of a pull's stream.
type message struct {
	ID       string `json:"id"`
	Status   string `json:"status"`
	Progress struct {
		Current int64 `json:"current"`
		Total   int64 `json:"total"`
	} `json:"progressDetail"`
	Error  string `json:"error"`
	Detail struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"errorDetail"`
}

// Pull fetches an image and reads the engine's stream to its end, where failures stand.
func (c *Client) Pull(ctx context.Context, ref string, each func(host.PullProgress)) error {
	body, err := c.api.ImagePull(ctx, ref, image.PullOptions{})
	if err != nil {
		return pullFailed(ref, failed("pull image "+ref, err))
	}
	defer body.Close()
	if err := readPull(body, each); err != nil {
		return pullFailed(ref, err)
	}
	if _, err := c.Image(ctx, ref); err != nil {
		if host.KindOf(err) == host.KindNotFound {
			return host.Errorf(host.KindUnavailable, "pull image %s: the engine ended the pull without the image", ref)
		}
		return err
	}
	return nil
}

func readPull(r io.Reader, each func(host.PullProgress)) error {
	layers := map[string]*layer{}
	decoder := json.NewDecoder(r)
	for {
		var m message
		err := decoder.Decode(&m)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return failed("read the pull's progress", err)
		case m.Error != "" || m.Detail.Message != "":
			text := m.Detail.Message
			if text == "" {
				text = m.Error
			}
			return host.Errorf(host.KindInternal, "%s", text)
		}
		each(progress(layers, m))
	}
}

type layer struct{ done, total int64 }

// progress adds a line to what is known of the layers.
func progress(layers map[string]*layer, m message) host.PullProgress {
	l := layers[m.ID]
	if l == nil {
		l = &layer{}
		layers[m.ID] = l
	}
	switch m.Status {
	case "Downloading":
		l.done, l.total = m.Progress.Current, max(m.Progress.Total, m.Progress.Current)
	case "Extracting":
		if l.total == 0 {
			l.total = m.Progress.Total
		}
		l.done = l.total
	case "Download complete", "Pull complete":
		l.done = l.total
	}
	p := host.PullProgress{Moment: fmt.Sprint(m.ID, "|", m.Status, "|", m.Progress.Current)}
	for _, l := range layers {
		p.Done += l.done
		p.Total += l.total
	}
	return p
}

// pullFailed sorts an engine's failure by its text, since the stream carries nothing else.
func pullFailed(ref string, err error) error {
	if host.KindOf(err) != host.KindInternal || errors.Is(err, context.Canceled) {
		return err
	}
	text := err.Error()
	kind := host.KindInternal
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(text, w) {
				return true
			}
		}
		return false
	}
	switch {
	case fullDisk(text):
		kind = host.KindNoSpace
	case has("unauthorized", "authentication required", "denied"):
		kind = host.KindDenied
	case has("manifest unknown", "name unknown", "repository does not exist", ": not found", "manifest for "):
		kind = host.KindNotFound
	}
	return host.Wrap(err, kind, "image %s", repositoryOf(ref))
}

func repositoryOf(ref string) string {
	name, _, _ := strings.Cut(ref, "@")
	return name
}
