package command

import (
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type imageView struct {
	Name        string  `json:"name"`
	Reference   string  `json:"reference"`
	Digest      string  `json:"digest"`
	Description string  `json:"description"`
	Default     bool    `json:"is_default"`
	RequireCUDA string  `json:"require_cuda"`
	SizeBytes   int64   `json:"size_bytes"`
	Workspaces  int32   `json:"workspaces"`
	CreatedAt   *moment `json:"created_at"`
}

func viewImage(i *carrelv1.Image) imageView {
	return imageView{
		Name: i.GetName(), Reference: i.GetReference(), Digest: i.GetDigest(), Description: i.GetDescription(), Default: i.GetIsDefault(),
		RequireCUDA: i.GetRequireCuda(), SizeBytes: i.GetSizeBytes(), Workspaces: i.GetWorkspaces(), CreatedAt: momentOf(i.GetCreatedAt()),
	}
}

func newImage(a *app) *cobra.Command {
	return group("image", "The catalogue of images", newImageList(a), newImageAdd(a), newImageRemove(a))
}

func newImageList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List images", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			allow := ""
			all, err := allPages(func(token string) ([]*carrelv1.Image, string, error) {
				resp, err := api.images.List(cmd.Context(), connect.NewRequest(&carrelv1.ImageServiceListRequest{PageSize: pageSize, PageToken: token}))
				if err != nil {
					return nil, "", err
				}
				allow = resp.Msg.GetAllow()
				return resp.Msg.GetImages(), resp.Msg.GetNextPageToken(), nil
			})
			if err != nil {
				return err
			}
			if text := allowText(allow); text != "" && a.sys.OutTerminal && !o.quiet {
				a.say("%s", text)
			}
			return writeList(a, imageList(), each(all, viewImage), o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func allowText(allow string) string {
	switch allow {
	case "any":
		return "--image takes these names, and any reference"
	case "registries":
		return "--image takes these names, and references to the registries that are allowed"
	case "catalogue":
		return "--image takes these names"
	}
	return ""
}

func imageList() output.List[imageView] {
	type col = output.Column[imageView]
	return output.List[imageView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(i imageView) string {
				if i.Default {
					return i.Name + " *"
				}
				return i.Name
			}, Value: func(i imageView) string { return i.Name }},
			{Name: "reference", Title: "REFERENCE", Text: func(i imageView) string { return i.Reference }},
			{Name: "digest", Title: "DIGEST", Text: func(i imageView) string { return orDash(clipTo(i.Digest, 19)) }, Value: func(i imageView) string { return i.Digest }},
			{Name: "size_bytes", Title: "SIZE", Right: true, Text: func(i imageView) string {
				if i.SizeBytes == 0 {
					return "-"
				}
				return output.Bytes(i.SizeBytes)
			}, Value: func(i imageView) string { return fmt.Sprint(i.SizeBytes) }},
			{Name: "require_cuda", Title: "NEEDS", Text: func(i imageView) string { return orDash(i.RequireCUDA) }, Value: func(i imageView) string { return i.RequireCUDA }},
			{Name: "workspaces", Title: "USED BY", Right: true, Text: func(i imageView) string { return fmt.Sprint(i.Workspaces) }},
			{Name: "is_default", Text: func(i imageView) string { return fmt.Sprint(i.Default) }},
			{Name: "created_at", Text: func(i imageView) string { return i.CreatedAt.text() }},
			{Name: "description", Title: "DESCRIPTION", Text: func(i imageView) string { return i.Description }},
		},
		ID:    func(i imageView) string { return i.Name },
		Empty: "no images; an admin adds them with `carrel image add NAME REFERENCE`",
	}
}

func newImageAdd(a *app) *cobra.Command {
	var description string
	var isDefault bool
	cmd := &cobra.Command{
		Use: "add NAME REFERENCE", Short: "Pin an image under a name, or pin a name anew (admins)", Args: exactArgs("NAME", "REFERENCE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.images.Add(cmd.Context(), connect.NewRequest(&carrelv1.AddRequest{Image: &carrelv1.Image{
				Name: args[0], Reference: args[1], Description: description, IsDefault: isDefault,
			}}))
			if err != nil {
				return err
			}
			i := resp.Msg.GetImage()
			pinned := i.GetDigest()
			if pinned == "" {
				pinned = "pinned when a host first resolves it"
			}
			return a.print("%s: %s (%s)", i.GetName(), i.GetReference(), pinned)
		},
	}
	cmd.Flags().StringVar(&description, "description", "", "one line for people")
	cmd.Flags().BoolVar(&isDefault, "default", false, "make it the image that `up` takes when none is named")
	return cmd
}

func newImageRemove(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Take a name out of the catalogue; workspaces that use it go on (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.images.Remove(cmd.Context(), connect.NewRequest(&carrelv1.RemoveRequest{Name: args[0]}))
			if err != nil {
				return err
			}
			return a.print("%s is removed; workspaces that go on with it: %d", args[0], resp.Msg.GetWorkspaces())
		},
	}
}
