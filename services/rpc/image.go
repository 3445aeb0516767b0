package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/fleet"
)

// ImageStore keeps the catalogue.
type ImageStore interface {
	Images(ctx context.Context) ([]fleet.Image, error)
	PutImage(ctx context.Context, image fleet.Image, now time.Time) (fleet.Image, error)
	RemoveImage(ctx context.Context, name string) (workspaces int, err error)
	ImageUse(ctx context.Context, digest string) (workspaces int, err error)
}

// ImageResolver asks hosts what a reference stands for.
type ImageResolver interface {
	Resolve(ctx context.Context, reference string) (fleet.ResolvedImage, fleet.HostID, error)
}

// Images serves ImageService.
type Images struct {
	Store    ImageStore
	Resolver ImageResolver
	Allow    string
	Now      func() time.Time
}

var _ carrelv1connect.ImageServiceHandler = (*Images)(nil)

// List returns images by name.
func (i *Images) List(ctx context.Context, req *connect.Request[carrelv1.ImageServiceListRequest]) (*connect.Response[carrelv1.ImageServiceListResponse], error) {
	images, err := i.Store.Images(ctx)
	if err != nil {
		return nil, err
	}
	page, next, err := slicePage(images, req.Msg.GetPageSize(), req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ImageServiceListResponse{NextPageToken: next, Allow: i.Allow}
	for _, image := range page {
		wire := imageOnWire(image)
		uses, err := i.Store.ImageUse(ctx, image.Digest)
		if err != nil {
			return nil, err
		}
		wire.Workspaces = int32(uses)
		res.Images = append(res.Images, wire)
	}
	return connect.NewResponse(res), nil
}

// Add pins an image under a name.
func (i *Images) Add(ctx context.Context, req *connect.Request[carrelv1.AddRequest]) (*connect.Response[carrelv1.AddResponse], error) {
	wire := req.Msg.GetImage()
	if err := fleet.CheckImageName(wire.GetName()); err != nil {
		return nil, err
	}
	if wire.GetReference() == "" {
		return nil, fleet.Errorf(fleet.KindInvalid, "say where image %s comes from, such as registry.example.org/cuda-dev:12.6", wire.GetName())
	}
	resolved, host, err := i.Resolver.Resolve(ctx, wire.GetReference())
	if err != nil {
		return nil, err
	}
	image := fleet.Image{
		Name: wire.GetName(), Reference: wire.GetReference(), Digest: resolved.Digest, Description: wire.GetDescription(), Default: wire.GetIsDefault(),
		RequireCUDA: resolved.RequireCUDA, SizeBytes: resolved.SizeBytes, CreatedAt: i.Now(),
	}
	if resolved.LocalOnly {
		image.Host = host
	}
	if image, err = i.Store.PutImage(ctx, image, i.Now()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.AddResponse{Image: imageOnWire(image)}), nil
}

// Remove takes a name out.
func (i *Images) Remove(ctx context.Context, req *connect.Request[carrelv1.RemoveRequest]) (*connect.Response[carrelv1.RemoveResponse], error) {
	n, err := i.Store.RemoveImage(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.RemoveResponse{Workspaces: int32(n)}), nil
}

func imageOnWire(i fleet.Image) *carrelv1.Image {
	return &carrelv1.Image{
		Name: i.Name, Reference: i.Reference, Digest: i.Digest, Description: i.Description, IsDefault: i.Default,
		RequireCuda: i.RequireCUDA, SizeBytes: i.SizeBytes, CreatedAt: stamp(i.CreatedAt),
	}
}
