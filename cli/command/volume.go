package command

import (
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type volumeView struct {
	ID              string   `json:"id"`
	Name            string   `json:"name"`
	Owner           string   `json:"owner"`
	Kind            string   `json:"kind"`
	Host            string   `json:"host"`
	Workspaces      []string `json:"workspaces"`
	HomeOf          string   `json:"home_of"`
	UsedBytes       *int64   `json:"used_bytes,omitempty"`
	CreatedAt       *moment  `json:"created_at"`
	DeletedAt       *moment  `json:"deleted_at,omitempty"`
	RestorableUntil *moment  `json:"restorable_until,omitempty"`
}

func viewVolume(v *carrelv1.Volume) volumeView {
	return volumeView{
		ID: v.GetId(), Name: v.GetName(), Owner: v.GetOwner(), Kind: word(v.GetKind()), Host: v.GetHost(), Workspaces: emptyIfNil(v.GetWorkspaces()),
		HomeOf: v.GetHomeOf(), UsedBytes: v.UsedBytes, CreatedAt: momentOf(v.GetCreatedAt()), DeletedAt: momentOf(v.GetDeletedAt()), RestorableUntil: momentOf(v.GetRestorableUntil()),
	}
}

func newVolume(a *app) *cobra.Command {
	return group("volume", "Volumes: files that outlive workspaces", newVolumeList(a), newVolumeRemove(a), newVolumeRestore(a))
}

func newVolumeList(a *app) *cobra.Command {
	o := listFlags{}
	var all, deleted bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List your volumes", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			rows, err := allPages(func(token string) ([]*carrelv1.Volume, string, error) {
				resp, err := api.volumes.List(cmd.Context(), connect.NewRequest(&carrelv1.VolumeServiceListRequest{PageSize: pageSize, PageToken: token, AllUsers: all, IncludeDeleted: deleted}))
				if err != nil {
					return nil, "", err
				}
				return resp.Msg.GetVolumes(), resp.Msg.GetNextPageToken(), nil
			})
			if err != nil {
				return err
			}
			return writeList(a, volumeList(all, a.sys.Now()), each(rows, viewVolume), o)
		},
	}
	a.listFlags(cmd, &o)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "everybody's (admins)")
	cmd.Flags().BoolVar(&deleted, "deleted", false, "deleted ones that can be restored, too")
	return cmd
}

func volumeList(owners bool, now time.Time) output.List[volumeView] {
	type col = output.Column[volumeView]
	owner := col{Name: "owner", Text: func(v volumeView) string { return v.Owner }}
	if owners {
		owner.Title = "OWNER"
	}
	return output.List[volumeView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(v volumeView) string { return v.Name }},
			owner,
			{Name: "kind", Title: "KIND", Text: func(v volumeView) string { return v.Kind }},
			{Name: "host", Title: "HOST", Text: func(v volumeView) string { return orDash(v.Host) }, Value: func(v volumeView) string { return v.Host }},
			{Name: "used_bytes", Title: "USED", Right: true, Text: func(v volumeView) string {
				if v.UsedBytes == nil {
					return "-"
				}
				return output.Bytes(*v.UsedBytes)
			}, Value: func(v volumeView) string {
				if v.UsedBytes == nil {
					return ""
				}
				return fmt.Sprint(*v.UsedBytes)
			}},
			{Name: "workspaces", Title: "MOUNTED BY", Text: func(v volumeView) string { return orDash(strings.Join(v.Workspaces, " ")) }, Value: func(v volumeView) string { return strings.Join(v.Workspaces, " ") }},
			{Name: "home_of", Title: "HOME OF", Text: func(v volumeView) string { return orDash(v.HomeOf) }, Value: func(v volumeView) string { return v.HomeOf }},
			{Name: "created_at", Title: "AGE", Text: func(v volumeView) string { return v.CreatedAt.ago(now) }, Value: func(v volumeView) string { return v.CreatedAt.text() }},
			{Name: "restorable_until", Title: "NOTE", Text: func(v volumeView) string {
				if v.DeletedAt == nil {
					return ""
				}
				return "deleted; restorable until " + v.RestorableUntil.stamp()
			}, Value: func(v volumeView) string { return v.RestorableUntil.text() }},
			{Name: "id", Title: "ID", Text: func(v volumeView) string { return v.ID }},
		},
		ID:    func(v volumeView) string { return v.Name },
		Empty: "no volumes",
	}
}

func newVolumeRemove(a *app) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm NAME", Short: "Delete a volume; it can be restored for 7 days", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.confirm(yes, "This deletes volume "+args[0]+" with its files"); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.volumes.Delete(cmd.Context(), connect.NewRequest(&carrelv1.VolumeServiceDeleteRequest{Volume: args[0]}))
			if err != nil {
				return err
			}
			v := viewVolume(resp.Msg.GetVolume())
			return a.print("%s is deleted; until %s: carrel volume restore %s", v.Name, v.RestorableUntil.stamp(), v.ID)
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

func newVolumeRestore(a *app) *cobra.Command {
	var as string
	cmd := &cobra.Command{
		Use: "restore NAME", Short: "Take a deleted volume back", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.volumes.Restore(cmd.Context(), connect.NewRequest(&carrelv1.RestoreRequest{Volume: args[0], As: as}))
			if err != nil {
				return err
			}
			return a.print("%s is back", resp.Msg.GetVolume().GetName())
		},
	}
	cmd.Flags().StringVar(&as, "as", "", "new `NAME`, where the old one is taken")
	return cmd
}
