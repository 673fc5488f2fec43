if (byId("texts")) chunkTexts(byId("texts"), data.texts);
