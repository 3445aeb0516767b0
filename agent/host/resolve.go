package host

import (
	"context"
	"strings"
)

// Resolved is what an image reference stands for.
type Resolved struct {
	Digest      string
	Present     bool
	LocalOnly   bool // only this host's engine has it
	RequireCUDA string
	Labels      map[string]string
	Bytes       int64 // 0 when unknown
}

// ResolveImage asks the registry, or the engine where no registry has the image. An image that was built here and never
// came from or went to a registry is taken as it is.
func (h *Host) ResolveImage(ctx context.Context, ref string) (Resolved, error) {
	if ref == "" || len(ref) > 1024 || strings.ContainsAny(ref, " \t\r\n\x00") {
		return Resolved{}, Errorf(KindInvalid, "%q is no image reference", ref)
	}
	if !isImageID(ref) && !h.opts.Policy.allowsImage(ref) {
		return Resolved{}, Errorf(KindInvalid, "the host policy file does not allow the image %s", ref)
	}
	local, err := h.runtime.Image(ctx, ref)
	kind := h.answered(err)
	switch {
	case kind == "" && (isImageID(ref) || digestOf(ref, local) == ""):
		return describe(local, local.ID, true), nil
	case kind == "":
		return h.resolveRemote(ctx, ref, &local)
	case kind != KindNotFound:
		return Resolved{}, err
	case isImageID(ref):
		return Resolved{}, Errorf(KindNotFound, "image %s is not on this host, and no registry has it", ref)
	}
	return h.resolveRemote(ctx, ref, nil)
}

// resolveRemote asks the registry; local is what the engine has under the reference, if anything.
func (h *Host) resolveRemote(ctx context.Context, ref string, local *Image) (Resolved, error) {
	digest, err := h.runtime.Resolve(ctx, ref)
	switch {
	case err == nil && local != nil && digest == digestOf(ref, *local):
		return describe(*local, digest, false), nil
	case err == nil:
		if pulled, err := h.runtime.Image(ctx, repository(ref)+"@"+digest); err == nil {
			return describe(pulled, digest, false), nil
		}
		return Resolved{Digest: digest}, nil
	case local != nil && KindOf(err) != KindDenied:
		return describe(*local, digestOf(ref, *local), false), nil // the registry is away; what it once gave is here
	case KindOf(err) == KindNotFound:
		return Resolved{}, Wrap(err, KindNotFound, "image %s is neither in its registry nor on this host", ref)
	}
	return Resolved{}, err
}

func describe(image Image, digest string, localOnly bool) Resolved {
	r := Resolved{Digest: digest, Present: true, LocalOnly: localOnly, Labels: image.Labels, Bytes: image.Bytes}
	for _, v := range image.Env {
		if value, ok := strings.CutPrefix(v, "NVIDIA_REQUIRE_CUDA="); ok {
			r.RequireCUDA = value
		}
	}
	return r
}

// digestOf is the registry digest under which the engine got an image from the reference's repository.
func digestOf(ref string, image Image) string {
	for _, d := range image.Digests {
		name, digest, ok := strings.Cut(d, "@")
		if ok && fullReference(name) == fullReference(repository(ref)) {
			return digest
		}
	}
	return ""
}
